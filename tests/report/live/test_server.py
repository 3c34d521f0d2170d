"""The server, asked as a browser would not: over raw sockets."""

import json
import re
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from narrowcast.report.live import WatchServer
from narrowcast.report.live.server import MOST_CONNECTIONS, MOST_STREAMS
from narrowcast.runs import RunFolder


@contextmanager
def serving(folder):
    with WatchServer(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server(run_folder):
    with serving(run_folder) as running:
        yield running


def send(server, request: bytes, *, until: bytes | None = None) -> bytes:
    """Return what the server answers, all of it or up to `until`."""
    with socket.create_connection(server.server_address, timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while (until is None or until not in answer) and (part := connection.recv(65536)):
            answer += part
        return answer


def ask(server, path="/", *, method="GET", host="127.0.0.1", more="", **rest):
    lines = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"
    return send(server, lines.encode(), **rest)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_the_server_listens_on_this_machine_alone(server):
    assert server.server_address[0] == "127.0.0.1"
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(OSError, match=r"refused|timed out|unreachable"):
            socket.create_connection((address, server.server_address[1]), timeout=2)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST", "127.0.0.1:6116", "localhost:9000"]
)
def test_this_machine_may_be_called_by_its_own_names_through_any_port(server, host):
    assert status(ask(server, host=host)) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:6116",
        "127.0.0.1.evil.example",
        "localhost.evil.example:6116",
        "evil.example#127.0.0.1",
        "127.0.0.1@evil.example",
        "localhost:80:evil",
        "2130706433",
        "0.0.0.0",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/events"])
def test_a_request_for_another_name_gets_nothing(server, host, path):
    answer = ask(server, path, host=host)
    assert status(answer) == 403
    assert b"quickstart" not in answer


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: evil.example\r\n"])
def test_a_request_without_one_name_gets_nothing(server, hosts):
    assert status(send(server, f"GET / HTTP/1.1\r\n{hosts}\r\n".encode())) == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/events", "/records.jsonl"])
def test_only_reading_is_allowed(server, method, path):
    assert status(ask(server, path, method=method)) in (405, 501)


@pytest.mark.parametrize(
    "path",
    [
        "/records.jsonl",
        "/recipe.yaml",
        "/../run/records.jsonl",
        "/..%2f..%2f..%2fetc/passwd",
        "/../../../../../../etc/passwd",
        "//etc/passwd",
        "/./",
        "/events/../records.jsonl",
        "/plotly.js",
        "/%00",
        "*",
        "http://localhost/",
        "/index.html",
    ],
)
def test_no_path_names_a_file(server, path):
    answer = ask(server, path)
    assert status(answer) == 404
    assert b"root:" not in answer
    assert b"kind" not in answer


def test_a_page_elsewhere_may_link_here_but_not_fetch(server):
    elsewhere = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: "
    for purpose in ("empty", "script", "iframe", "document"):
        for path in ("/events", "/events?x"):
            assert status(ask(server, path, more=f"{elsewhere}{purpose}\r\n")) == 403
    assert status(ask(server, "/", more=f"{elsewhere}iframe\r\n")) == 403
    assert status(ask(server, "/", more=f"{elsewhere}document\r\n")) == 200
    assert b"Access-Control-Allow-Origin" not in ask(server, more="Origin: http://evil.example\r\n")


@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
def test_every_answer_forbids_what_a_page_could_be_made_to_do(server, path):
    head = ask(server, path, until=b"\r\n\r\n").decode()
    policy = re.search(r"Content-Security-Policy: (.*)\r", head)[1]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert re.search(r"script-src 'sha256-\S+' 'self';", policy)
    assert "X-Content-Type-Options: nosniff" in head
    assert "Cross-Origin-Resource-Policy: same-origin" in head
    assert "Python" not in head


def test_the_page_names_no_other_address(server):
    page = ask(server).decode()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert page.count("<script") == 2


def test_a_head_request_has_no_body(server):
    answer = ask(server, method="HEAD")
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\n")
    assert ask(server, "/events", method="HEAD").endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    "request_",
    [b"\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n"],
)
def test_what_is_no_request_is_refused_without_being_repeated(server, request_):
    answer = send(server, request_ + b"<script>\r\n\r\n")
    assert b"<script>" not in answer
    # What has no version is answered as HTTP/0.9 was: without a status line.
    assert not answer.startswith(b"HTTP") or status(answer) in (400, 403, 505)
    assert b"<h1" not in answer


def test_a_line_that_does_not_end_is_cut_off(server):
    answer = send(server, b"GET /" + b"a" * 70_000)
    assert status(answer) == 414


def test_the_stream_begins_with_all_and_goes_on_with_what_is_new(make_run, open_page, step):
    folder = make_run([step(n) for n in range(1, 281)], steps=1000)
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder))
        stream = stack.enter_context(socket.create_connection(server.server_address, 20))
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        file = stack.enter_context(stream.makefile("rb"))
        while file.readline() != b"\r\n":
            pass
        page = open_page(folder).take(json.loads(file.readline().removeprefix(b"data: ")))
        assert page.steps == list(range(1, 281))
        with RunFolder.open(folder) as run:
            run.write(step(281))
        assert file.readline() == b"\n"
        line = file.readline()
        assert len(line) < 3000
        assert page.take(json.loads(line.removeprefix(b"data: "))).steps[-1] == 281


def test_streams_are_limited_and_a_closed_one_makes_room(server):
    request = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    open_ones = []
    for _ in range(MOST_STREAMS):
        connection = socket.create_connection(server.server_address, timeout=20)
        connection.sendall(request)
        assert status(connection.recv(64)) == 200
        open_ones.append(connection)
    assert status(ask(server, "/events")) == 503
    assert status(ask(server)) == 200
    for connection in open_ones:
        connection.close()
    end = time.monotonic() + 10
    while status(ask(server, "/events", until=b"\r\n")) != 200:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_connections_that_say_nothing_do_not_pile_up(server):
    silent = [
        socket.create_connection(server.server_address, timeout=20)
        for _ in range(MOST_CONNECTIONS + 10)
    ]
    time.sleep(0.5)
    names = [thread.name for thread in threading.enumerate()]
    assert sum("process_request_thread" in name for name in names) <= MOST_CONNECTIONS
    for connection in silent:
        connection.close()
    end = time.monotonic() + 10
    while not (answer := ask(server)):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert status(answer) == 200


def test_the_server_tells_nothing_of_the_folder_it_was_not_asked_to(server, run_folder):
    (run_folder / "secret.txt").write_text("hidden")
    assert status(ask(server, "/secret.txt")) == 404
    told = ask(server, "/events", until=b"\n\n")
    assert b"enough to see it learn" not in told  # a comment of recipe.yaml
