"""The report of runs that go on, served on 127.0.0.1: the page, and the news since what it has seen.

The files are read again only when one of them has changed. Nothing is written and nobody else is asked.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rtopk.tools.report.inputs import is_going_on, read, watched
from rtopk.tools.report.page import Page

HOST = "127.0.0.1"


class Live:
    """The state of the files as a page, made again when they change."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock = threading.Lock()
        self._version = ""
        self._page: Page | None = None

    def now(self) -> tuple[str, Page]:
        """Return the version of the files and their page."""
        with self._lock:
            state = json.dumps(watched(self.paths), sort_keys=True).encode()
            version = hashlib.blake2b(state, digest_size=8).hexdigest()
            if self._page is None or version != self._version:
                self._page = Page(read(self.paths), live=True)
                self._version = version
            return version, self._page

    def news(self, seen: str) -> bytes | None:
        """Return what a page needs to renew itself, None if it has seen it all."""
        version, page = self.now()
        if version == seen:
            return None
        going = sum(is_going_on(run) for run in page.inputs.runs)
        news = {
            "version": version,
            "frame": page.frame(),
            "model": page.model(),
            "parts": page.parts(),
            "going": going,
        }
        return json.dumps(news, allow_nan=False).encode()


class Handler(BaseHTTPRequestHandler):
    """Answer for the page and its news; nothing else is served."""

    live: Live
    timeout = 30

    def do_GET(self) -> None:
        """Answer one request."""
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in (HOST, "localhost"):  # a page elsewhere that points its name at us is not ours
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"only 127.0.0.1 is served\n")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                page = self.live.now()[1].html().encode()
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page)
            elif url.path == "/live.json":
                news = self.live.news(parse_qs(url.query).get("seen", [""])[0])
                status = HTTPStatus.NO_CONTENT if news is None else HTTPStatus.OK
                self._answer(status, "application/json", news or b"")
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is only /\n")
        except ValueError as error:  # the files became unreadable; say so and go on
            self._answer(HTTPStatus.OK, "application/json", json.dumps({"error": str(error)}).encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as above
        """Say nothing: the terminal is the user's."""


def serve(paths: Sequence[Path], port: int, tell: Callable[[str], None]) -> None:
    """Serve until interrupted; `tell` gets the address once it answers."""
    live = Live(paths)
    live.now()  # what cannot be read is said before a server starts
    handler = type("LiveHandler", (Handler,), {"live": live})
    with ThreadingHTTPServer((HOST, port), handler) as server:
        server.daemon_threads = True
        tell(f"http://{HOST}:{server.server_port}/")
        server.serve_forever(poll_interval=0.2)
