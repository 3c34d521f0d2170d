"""A web server for one page and one run, on 127.0.0.1 only.

It checks the requested host name, because a foreign page could point its own name here and read
along (DNS rebinding).
"""

import json
import logging
import os
import select
import socketserver
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import socket
from threading import BoundedSemaphore, Event
from typing import Any, final

from narrowcast.report.live.page import LiveDocument, documents, security_policy
from narrowcast.report.live.watched import Cursor, WatchedRun

ADDRESS = "127.0.0.1"
EVENTS = "/events"
DEFAULT_PORT = 6116
"""Near TensorBoard's 6006, past the ports of X11 and those that browsers refuse."""
NAMES = frozenset({"127.0.0.1", "localhost"})
"""Allowed host names. The port is not checked: a tunnel (`ssh -L`) has its own."""
MOST_CONNECTIONS = 48
MOST_STREAMS = 32
"""Pages that are open at once; a browser opens six at most."""
PAUSE_SECONDS = 0.5
"""Between two messages to a page."""
BEAT_SECONDS = 10.0
"""Between two signs of life, when nothing has changed."""
PATIENCE_SECONDS = 15.0
"""Timeout for a request to arrive and for a response to be read."""
PIECE_BYTES = 2**16

_log = logging.getLogger(__name__)


@final
class WatchServer(socketserver.ThreadingTCPServer):
    """Serves the live page of the run in one folder until it is shut down."""

    # Not an http.server.HTTPServer, which looks up this machine's name before it listens.

    # It can be started again at once; on Windows this would let others share the port.
    allow_reuse_address = os.name == "posix"
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, folder: Path, *, port: int) -> None:
        """Listen on `port`, or on any free one for 0; raise OSError where it is taken."""
        self.watched = WatchedRun(folder)
        self.stopping = Event()
        self.streams = BoundedSemaphore(MOST_STREAMS)
        self._connections = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def run(self) -> None:
        """Serve until an exception such as `KeyboardInterrupt` ends it."""
        with self:
            # Made and read ahead, so that the first page does not wait for it.
            documents()
            self.watched.since(Cursor())
            try:
                self.serve_forever(poll_interval=PAUSE_SECONDS)
            finally:
                self.stopping.set()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in its own thread, or close it if there are too many."""
        if not self._connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note what went wrong with one request; a page that is closed is the usual case."""
        _log.debug("a request was cut short", exc_info=True)


@final
class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with its answer."""

    server: WatchServer
    connection: socket
    timeout = PATIENCE_SECONDS

    def do_GET(self) -> None:  # http.server's name
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _method_not_allowed(self) -> None:
        self._say(
            HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are supported", Allow="GET, HEAD"
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _method_not_allowed  # noqa: N815
    do_TRACE = do_CONNECT = _method_not_allowed  # noqa: N815

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if not self._is_for_us(path):
            self._say(HTTPStatus.FORBIDDEN, "this page is available on localhost only")
            return
        if path == EVENTS:
            self._stream(with_body=with_body)
        elif (document := documents().get(path)) is not None:
            self._send(document, with_body=with_body)
        else:
            self._say(HTTPStatus.NOT_FOUND, "no such page")

    def _is_for_us(self, path: str) -> bool:
        """Return whether the request names this machine and comes from no other page."""
        hosts = self.headers.get_all("Host", [])
        name = hosts[0].rpartition(":") if len(hosts) == 1 else ("", "", "")
        host = name[0] if name[1] and name[2].isdecimal() else "".join(name)
        if host.lower() not in NAMES:
            return False
        # A link elsewhere may lead to the page; a script or a frame there has no business here.
        came_from = self.headers.get("Sec-Fetch-Site", "none")
        purpose = self.headers.get("Sec-Fetch-Dest", "document")
        linked = purpose == "document" and path != EVENTS
        return came_from in ("none", "same-origin") or linked

    def _send(self, document: LiveDocument, *, with_body: bool) -> None:
        accepted = self.headers.get("Accept-Encoding", "")
        packed = bool(document.packed) and "gzip" in accepted
        body = document.packed if packed else document.body
        self._begin(HTTPStatus.OK, document.kind, lasting=document.lasting)
        if document.packed:
            self.send_header("Vary", "Accept-Encoding")
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self._write(body)

    def _stream(self, *, with_body: bool) -> None:
        """Send what happens as it happens, until the page is closed or the server ends."""
        if not self.server.streams.acquire(blocking=False):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "too many open pages")
            return
        try:
            self._begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            self.end_headers()
            if with_body:
                self._tell()
        finally:
            self.server.streams.release()

    def _tell(self) -> None:
        cursor, notice = Cursor(), time.monotonic()
        while not self.server.stopping.is_set():
            cursor, news = self.server.watched.since(cursor)
            if news or time.monotonic() > notice + BEAT_SECONDS:
                text = json.dumps(news, separators=(",", ":"), allow_nan=False)
                # A line that begins with a colon is passed over by browsers.
                self._write(f"data: {text}\n\n".encode() if news else b": still here\n\n")
                notice = time.monotonic()
            # A page says nothing more; what can be read is its end.
            if select.select([self.connection], [], [], PAUSE_SECONDS)[0]:
                return

    def _write(self, body: bytes) -> None:
        # In pieces, each with its own time to be taken: a tunnel may be slow.
        for at in range(0, len(body), PIECE_BYTES):
            self.wfile.write(body[at : at + PIECE_BYTES])

    def _begin(self, status: HTTPStatus, kind: str, *, lasting: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        keep = "private, max-age=31536000, immutable" if lasting else "no-store"
        self.send_header("Cache-Control", keep)
        self.send_header("Content-Security-Policy", security_policy())
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")

    def _say(self, status: HTTPStatus, text: str, **headers: str) -> None:
        body = f"{text}\n".encode()
        self._begin(status, "text/plain; charset=utf-8")
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error without repeating the request."""
        self.close_connection = True
        self._say(HTTPStatus(code), "bad request")

    def version_string(self) -> str:
        """Return the name of the program without its version."""
        return "narrowcast"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing: what a request holds is not fit for a terminal."""
