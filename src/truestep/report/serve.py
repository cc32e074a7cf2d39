"""Serves the report of runs that go on: one page, on this machine alone, made anew when the runs have written more.

Nothing of a run's directory is served but that page. A request must name this machine as its host, so that a page of
another site, whose name is made to lead here, gets nothing.
"""

import hashlib
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6, gethostname
from urllib.parse import urlsplit

from truestep.errors import TruestepError
from truestep.files import write_text_whole
from truestep.kept.files import FOLDER
from truestep.report.page import live_html, page_html
from truestep.report.parts import policy

FILES = ("metrics.jsonl", "evaluation.jsonl", "ledger.jsonl", "rejected.jsonl", "warnings.jsonl", "config.yaml")
# Making the page takes at most this share of the time, however long the run is.
LARGEST_SHARE = 0.2
LEAST_SECONDS = 1.0


def state_of(runs: Sequence[Path]) -> str:
    """Name the state of the runs' files: two states with the same name have the same page."""
    digest = hashlib.sha256()
    for run in runs:
        for path in [*(run / name for name in FILES), run / FOLDER]:
            try:
                found = path.stat()
            except OSError:
                continue
            digest.update(f"{path} {found.st_size} {found.st_mtime_ns};".encode(errors="replace"))
    return digest.hexdigest()[:32]


class LivePage:
    """The page of the runs, made anew in the background when they have written more, and kept in a file too."""

    def __init__(self, runs: Sequence[Path], output: Path | None = None, say: Callable[[str], None] = print) -> None:
        self.runs, self.output, self._say = list(runs), output, say
        self._stop, self._writing, self._changed = threading.Event(), threading.Lock(), threading.Condition()
        self._state, self._page = "", b""
        self._make(state_of(self.runs))
        self._thread = threading.Thread(target=self._keep, name="report", daemon=True)
        self._thread.start()

    def current(self) -> tuple[str, bytes]:
        """Give the name of the page's state, and the page."""
        with self._changed:
            return self._state, self._page

    def wait_for_another(self, state: str, timeout: float | None = None) -> str:
        """Wait until the page has another state, or a time is over, and give its state."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != state, timeout)
            return self._state

    def close(self) -> None:
        """Make no more pages. One that is in the making is given up; one that is being written is whole first."""
        self._stop.set()
        with self._writing:
            pass

    def _make(self, state: str) -> None:
        page = page_html(self.runs)
        with self._writing:
            if self.output is not None and not self._stop.is_set():
                write_text_whole(self.output, page)
        with self._changed:
            self._state, self._page = state, live_html(page, state).encode("utf-8", errors="replace")
            self._changed.notify_all()

    def _keep(self) -> None:
        pause, problem = LEAST_SECONDS, ""
        while not self._stop.wait(pause):
            state = state_of(self.runs)
            if state == self._state:
                pause = LEAST_SECONDS
                continue
            began = time.monotonic()
            try:
                self._make(state)
                problem = ""
            except Exception as error:  # a file that is being replaced, a full disk: the next look may succeed
                if problem != (problem := f"{type(error).__name__}: {error}"):
                    self._say(f"the page could not be made and stays as it was: {problem}")
            pause = max(LEAST_SECONDS, (time.monotonic() - began) * (1 / LARGEST_SHARE - 1))


class _Handler(BaseHTTPRequestHandler):
    server: "ReportServer"
    server_version, sys_version = "truestep", ""
    timeout = 30  # seconds for a request that is sent slowly

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        if not self.server.is_ours(self.headers.get_all("Host") or []):
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this server has another name\n", "text/plain", body)
        state, page = self.server.live.current()
        if self.path == "/":
            return self._send(HTTPStatus.OK, page, "text/html", body)
        if self.path == "/version":
            return self._send(HTTPStatus.OK, state.encode(), "text/plain", body)
        return self._send(HTTPStatus.NOT_FOUND, b"there is one page here: /\n", "text/plain", body)

    def _send(self, status: HTTPStatus, content: bytes, kind: str, body: bool) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": policy(live=True) + "; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are of no interest."""


class ReportServer(ThreadingHTTPServer):
    """Answers requests for a live page."""

    daemon_threads = True

    def __init__(self, live: LivePage, host: str, port: int, *, remote: bool = False) -> None:
        address = _address(host)
        if not address.is_loopback and not remote:
            raise TruestepError(
                f"--host {host} can be reached from other machines, and the page shows all that the run has written. "
                "Add --remote if that is meant, or reach this machine by `ssh -L`"
            )
        self.live, self._remote = live, remote
        if address.version == 6:
            self.address_family = AF_INET6
        try:
            super().__init__((str(address), port), _Handler)
        except OSError as error:
            raise TruestepError(f"--host {host} --port {port}: {error.strerror or error}") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def is_ours(self, named: Sequence[str]) -> bool:
        """Tell whether a request names this machine. Its port may be another one: that of a tunnel."""
        if len(named) != 1:
            return False
        try:
            host = urlsplit(f"//{named[0]}").hostname or ""
        except ValueError:
            return False
        if host == "localhost":
            return True
        if self._remote and host == gethostname().lower():
            return True
        try:
            # A name can be made to lead anywhere by who owns it; an address cannot.
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or self._remote

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a browser that went away go."""


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise TruestepError(f"--host {host}: this must be an IP address, such as 127.0.0.1") from None


def serve(
    runs: Sequence[Path], output: Path | None, host: str, port: int, say: Callable[[str], None], *, remote: bool = False
) -> None:
    """Serve the page until Ctrl-C."""
    live = LivePage(runs, output, say)
    try:
        server = ReportServer(live, host, port, remote=remote)
        say(f"{server.url}  (Ctrl-C ends it)")
        with server:
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        say("stopped")
    finally:
        live.close()
