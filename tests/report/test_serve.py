"""The page that is served: it follows a run that grows, and gives nothing but itself, to this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from truestep.errors import TruestepError
from truestep.report import serve
from truestep.report.serve import LivePage, ReportServer, state_of

SECRET = "only in a file of the run's directory"


def write_steps(run: Path, first: int, last: int) -> None:
    run.mkdir(exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "loss": 1 / step, "documents_seen": 8 * step}) + "\n")


def make_run(path: Path) -> Path:
    write_steps(path, 1, 3)
    (path / "secret.txt").write_text(SECRET)
    return path


@contextmanager
def serving(runs: list[Path], output: Path | None = None, **options: bool) -> Iterator[ReportServer]:
    live = LivePage(runs, output)
    server = ReportServer(live, "127.0.0.1", 0, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        live.close()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_follows_a_run_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LEAST_SECONDS", 0.05)
    run, output = make_run(tmp_path / "run"), tmp_path / "page.html"
    with serving([run], output) as server:
        state = ask(server, "/version")[1]
        status, page, headers = ask(server, "/")
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        assert f'<meta name="truestep-live" content="{state}">' in page
        assert "<dt>Steps</dt><dd>3</dd>" in page
        for last in (5, 9):
            write_steps(run, last - 1, last)
            state = server.live.wait_for_another(state, timeout=120)
            assert ask(server, "/version")[1] == state
            page = ask(server, "/")[1]
            assert f"<dt>Steps</dt><dd>{last if last == 5 else 7}</dd>" in page
            # The file is made anew too. It has no server to ask.
            written = output.read_text()
            assert f"<dt>Steps</dt><dd>{last if last == 5 else 7}</dd>" in written
            assert 'truestep-live" content' not in written and "connect-src" not in written


def test_nothing_written_is_no_news(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    state = state_of([run])
    assert state_of([run]) == state
    (run / "secret.txt").write_text("something else")
    assert state_of([run]) == state
    write_steps(run, 4, 4)
    assert state_of([run]) != state


@pytest.mark.parametrize(
    "path",
    [
        "/secret.txt", "/metrics.jsonl", "/../secret.txt", "/%2e%2e/secret.txt", "//secret.txt", "/run/secret.txt",
        "/./metrics.jsonl", "/..%2fsecret.txt", "/version/../secret.txt", "http://127.0.0.1/secret.txt", "*",
        "/\\..\\secret.txt",
        "/static/charts.js", "/report.html", "/" + "a" * 5000,
    ],
)  # fmt: skip
def test_nothing_but_the_page_is_served(tmp_path: Path, path: str) -> None:
    with serving([make_run(tmp_path / "run")]) as server:
        status, text, _ = ask(server, path)
        assert status == 404 and SECRET not in text and "loss" not in text
        assert ask(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:{port}", True), ("localhost:{port}", True), ("localhost:9999", True), ("[::1]:{port}", True),
        ("LOCALHOST", True), ("127.1.2.3", True),
        ("evil.example:{port}", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
        ("192.168.1.7:{port}", False), ("0.0.0.0:{port}", False), ("", False), ("[::1", False), ("[::]", False),
        ("evil.example@127.0.0.1", True),  # what browsers never send: the host is this machine
    ],
)  # fmt: skip
def test_a_request_must_name_this_machine(tmp_path: Path, host: str, ours: bool) -> None:
    """A site whose name is made to lead to this machine (DNS rebinding) is told nothing."""
    with serving([make_run(tmp_path / "run")]) as server:
        for path in ("/", "/version"):
            status, text, _ = ask(server, path, Host=host.format(port=server.server_address[1]))
            assert status == (200 if ours else 421)
            assert ours or text == "this server has another name\n"


def test_other_methods_and_broken_requests_are_refused(tmp_path: Path) -> None:
    with serving([make_run(tmp_path / "run")]) as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert ask(server, "/", method)[0] == 501
        status, text, headers = ask(server, "/", "HEAD")
        assert status == 200 and text == "" and int(headers["Content-Length"]) > 1000
        assert headers["Cache-Control"] == "no-store" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        for request in (
            b"\x00\xff\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        ):
            with socket.create_connection(server.server_address[:2], timeout=60) as connection:
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
            assert b"Steps</dt>" not in answer
        assert ask(server, "/")[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.com", "", "127.0.0.1; rm"])
def test_an_address_that_others_reach_is_refused(tmp_path: Path, host: str) -> None:
    live = LivePage([make_run(tmp_path / "run")])
    with pytest.raises(TruestepError, match="--host"):
        ReportServer(live, host, 0)
    live.close()


def test_it_is_served_to_others_where_that_is_asked_for(tmp_path: Path) -> None:
    with serving([make_run(tmp_path / "run")], remote=True) as server:
        assert ask(server, "/", Host="192.168.1.7")[0] == 200
        assert ask(server, "/", Host="evil.example")[0] == 421
        taken = server.server_address[1]
        with pytest.raises(TruestepError, match=f"--port {taken}"):
            ReportServer(server.live, "127.0.0.1", taken)


def test_a_page_that_cannot_be_made_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LEAST_SECONDS", 0.05)
    said: list[str] = []
    told = threading.Event()
    run = make_run(tmp_path / "run")
    live = LivePage([run], None, lambda text: (said.append(text), told.set())[1])
    before, make = live.current(), serve.page_html

    def fail(*_: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(serve, "page_html", fail)
    write_steps(run, 4, 4)
    assert told.wait(120) and "OSError: disk full" in said[0]
    assert live.current() == before
    monkeypatch.setattr(serve, "page_html", make)
    live.wait_for_another(before[0], timeout=120)
    assert b"<dt>Steps</dt><dd>4</dd>" in live.current()[1]
    assert len(said) == 1
    live.close()


def test_the_command_ends_by_ctrl_c(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 7\n")  # a run that has just begun
    command = [sys.executable, "-m", "truestep", "report", str(run), "--serve"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in the background of a shell, it has every process below it ignore a Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/", first)
        assert found, (first, process.stderr and process.stderr.read())
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        connection.request("GET", "/")
        assert b"metrics.jsonl is missing" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, rest.strip(), errors) == (0, "stopped", "")
    assert "metrics.jsonl is missing" in (run / "report.html").read_text()
