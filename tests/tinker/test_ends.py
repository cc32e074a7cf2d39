"""How a server ends while something is being written, and the threads that write."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tinker.house import House, config_of, served_in
from tinker.killed import run_server_on_a_disk_that_stands_still
from tinker.test_kills import begun, free_port, kill
from truestep import dump_config
from truestep.commands.session.session import Session
from truestep.commands.tinker import writes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


@pytest.fixture
def house(folder: Path, tmp_path: Path) -> House:
    house = served_in(folder, tmp_path / "checkpoints")
    house.make()
    return house


class Held:
    """Checkpoints that are written wait until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.met, self.released, self.fails = threading.Event(), threading.Event(), False
        write = Session.write

        def slow(session: Session, *given: Any, **named: Any) -> Any:
            self.met.set()
            assert self.released.wait(60)
            if self.fails:
                raise RuntimeError("cannot schedule new futures after shutdown")
            return write(session, *given, **named)

        monkeypatch.setattr(Session, "write", slow)


def begin(house: House, held: Held, promise: Any) -> Any:
    while house.tinker.turn():
        pass
    assert held.met.wait(60)
    return promise


@pytest.mark.parametrize("fails", [False, True], ids=["is complete later", "fails because the process ends"])
def test_what_is_written_when_the_server_ends_does_not_fail(
    fails: bool, folder: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told nothing, and the next server writes it again."""
    held = Held(monkeypatch)
    promise = begin(house, held, house.recorded("sampler", seq_id=1))
    assert not house.tinker.state.writes.stop(0.0)
    refused = house.send("save", seq_id=2)
    assert refused.status_code == 503 and house.send("session").status_code == 503
    held.fails = fails
    held.released.set()
    house.settle()
    held.fails = False
    job = house.tinker.state.known(house.tinker.state.models[f"{house.session}:train:0"].tenant, promise["request_id"])
    assert job is not None and not job.future.done()
    house = house.started_again(folder)
    assert house.result(promise)["sampling_session_id"] == f"{house.session}:sample:0"
    assert isinstance(house.result(house.recorded("sample")), bytes)


def test_a_server_whose_disk_stands_still_ends(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(dump_config(config_of(tmp_path)))
    serving = begun(run_server_on_a_disk_that_stands_still, str(tmp_path), free_port())
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "met").exists():
            assert serving.is_alive() and time.monotonic() < end, (tmp_path / "console.txt").read_text()[-3000:]
            time.sleep(0.02)
        assert serving.pid is not None
        os.kill(serving.pid, signal.SIGINT)
        serving.join(60)
        assert serving.exitcode == 130
    finally:
        if serving.is_alive():
            kill(serving)
    console = (tmp_path / "console.txt").read_text()
    assert "the disk stands still" in console and "stopped; the same command starts again" in console
    served_in(tmp_path, tmp_path / "checkpoints")  # nobody holds the directory


def test_a_save_of_a_session_that_is_gone_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    begin(house, held, house.recorded("sampler", seq_id=1))
    state = house.tinker.state
    state.finish(state.sessions[house.session])
    del state.sessions[house.session]  # as of the oldest of many that have finished
    held.released.set()
    house.work()
    assert not list(house.tinker.directory.glob("*/*/sampler_weights/*"))


def test_sessions_that_ended_leave_no_thread(house: House) -> None:
    def alive() -> int:
        for thread in threading.enumerate():
            if thread.name.startswith("writes"):
                thread.join(0.5)
        return threading.active_count()

    before = alive()
    for _ in range(5):
        house.begin()
        house.get(f"sessions/{house.session}/finish", "POST")
        house.work()
    assert alive() == before


def test_where_no_thread_begins_the_caller_writes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def full(thread: threading.Thread) -> None:
        if thread.name == "writes":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(writes.threading.Thread, "start", full)
    assert "path" in house.result(house.recorded("save", seq_id=1))
    assert "sampling_session_id" in house.result(house.recorded("sampler", seq_id=2))
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    assert refused
