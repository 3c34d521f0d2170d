import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from narrowcast.report.live import DEFAULT_PORT
from narrowcast.runs import RunFolder


@pytest.fixture
def watching(start):
    """Start `narrowcast watch`, and return the process and the address it has printed."""
    started = []

    def begin(*words):
        process = start("watch", *words)
        started.append(process)
        line = process.stdout.readline()
        return process, re.search(r"http://127\.0\.0\.1:\d+/", line)[0]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_path(tmp_path):
    RunFolder.create(tmp_path / "run", recipe_text="", resolved={}, environment={})
    return tmp_path / "run"


def test_a_real_run_is_served_and_ctrl_c_ends_it_with_nothing_to_complain_of(
    narrowcast, watching, tiny, tmp_path
):
    assert narrowcast("train", tiny, "--out", tmp_path / "run").code == 0
    process, url = watching(tmp_path / "run", "--port", 0)
    with urllib.request.urlopen(url + "events", timeout=20) as stream:
        told = stream.readline().decode()
    assert '"label":"Finished"' in told
    assert "Step 4 of 4" in told
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_ctrl_c_ends_watch_while_a_page_is_open(watching, run_path):
    process, url = watching(run_path, "--port", 0)
    with urllib.request.urlopen(url + "events", timeout=20) as stream:
        stream.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


def test_a_port_that_is_asked_for_and_taken_is_refused(narrowcast, run_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = narrowcast("watch", run_path, "--port", port)
    assert ended.code == 2
    assert f"--port {port} is in use" in ended.err
    assert "--port 0" in ended.err


def test_the_next_free_port_is_taken_and_said(watching, run_path):
    first, one = watching(run_path)
    second, other = watching(run_path)
    assert one != other
    for process in (first, second):
        process.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=20)
    port = int(other.rstrip("/").rpartition(":")[2])
    assert err == f"port {DEFAULT_PORT} is in use; using port {port}\n"


@pytest.mark.parametrize("what", ["nothing-here", "."])
def test_what_is_no_run_folder_is_bad_input(narrowcast, tmp_path, what):
    ended = narrowcast("watch", tmp_path / what)
    assert ended.code == 2
    assert "Name the --out folder of a run" in ended.err


def test_watching_does_not_wait_for_torch():
    script = (
        "import sys, narrowcast.cli.watch, narrowcast.report.live.server as s;"
        "s.documents(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_real_run_is_followed_through_its_death_and_its_resumption(
    narrowcast, start, watching, tiny, tmp_path
):
    out = tmp_path / "run"
    with start("train", tiny, "steps=100000", "checkpoint.every=5", "--out", out) as training:
        while not (out / "checkpoints" / "step-000005").is_dir():
            assert training.poll() is None
            time.sleep(0.01)
        _, url = watching(out, "--port", 0)
        with urllib.request.urlopen(url + "events", timeout=60) as stream:
            seen_until(stream, "Running")
            training.kill()
            training.communicate()
            # Killed just after a checkpoint it has left what one that was interrupted leaves.
            told = seen_until(stream, "Seems dead", "Interrupted")
            reached = int(re.search(r"Step ([\d,]+) of", told["progress"])[1].replace(",", ""))
            assert narrowcast("resume", out, f"steps={reached + 3}").code == 0
            told = seen_until(stream, "Finished")
    assert told["progress"] == f"Step {reached + 3:,} of {reached + 3:,}"
    assert told["began"].endswith("resumed 1 time")


def seen_until(stream, *labels):
    """Read what the page is told until the run is in one of these states; return its head."""
    for line in stream:
        if line.startswith(b"data: "):
            head = json.loads(line.removeprefix(b"data: ")).get("head")
            if head and head["state"]["label"] in labels:
                return head
    raise AssertionError(labels)
