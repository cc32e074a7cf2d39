"""A write of one tenant that does not end stops nobody else, and what the tenant sent is computed when it has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tinker.house import House, metrics_of, request_of, served_in, tenant_of
from truestep.commands.session.session import Session
from truestep.commands.tinker import jobs, journal
from truestep.commands.tinker.checkpoints import Checkpoints
from truestep.commands.tinker.usage import Quota


class SlowDisk:
    """Writes to paths with this name wait until they are released."""

    def __init__(self) -> None:
        self.name = ""
        self.met, self._released = threading.Event(), threading.Event()

    def write(self, path: Any) -> None:
        if self.name and self.name in str(path):
            self.met.set()
            assert self._released.wait(120), "the disk is released"

    def release(self) -> None:
        self.name = ""
        self._released.set()


@pytest.fixture
def disk() -> Iterator[SlowDisk]:
    disk = SlowDisk()
    yield disk
    disk.release()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slow")


def plant(monkeypatch: pytest.MonkeyPatch, disk: SlowDisk, what: str) -> None:
    """Requests and results are appended to the journal; a state and a checkpoint are written by a session."""
    append, note, keep, write = journal._append, journal.Journal.note, Session.write, Checkpoints.write

    def slow_append(file: Path, raw: bytes) -> None:
        if (b'"kind": "%s"' % what.encode()) in raw[:60]:
            disk.write(file)
        append(file, raw)

    def slow_note(self: journal.Journal, session: str, event: Mapping[str, Any]) -> None:
        if what == "sampler" == event["kind"]:
            disk.write(session)
        note(self, session, event)

    def slow_keep(self: Session, directory: Path, **given: Any) -> Path:
        if what == "state":
            disk.write(directory)
        return keep(self, directory, **given)

    def slow_write(self: Checkpoints, tenant: str, saved: Any, *given: Any, **named: Any) -> Any:
        if what == "checkpoint":
            disk.write(saved.run)
        return write(self, tenant, saved, *given, **named)

    monkeypatch.setattr(journal, "_append", slow_append)
    monkeypatch.setattr(journal.Journal, "note", slow_note)
    monkeypatch.setattr(Session, "write", slow_keep)
    monkeypatch.setattr(Checkpoints, "write", slow_write)
    if what == "state":
        monkeypatch.setattr(jobs, "_STATE_SECONDS", 0.0)


def steps(house: House, first: int) -> list[Any]:
    """Two steps and a save; the promises of what a client sends."""
    model, made = f"{house.session}:train:0", []
    for seq in (first, first + 2):
        data = [([3, 4, 5], {"target_tokens": [4, 5, 6], "weights": [1.0, 0.5, seq / 8]})]
        raw = request_of(model, seq, data, "cross_entropy")
        made.append(house.post("forward_backward", content=raw).json())
        made.append(house.recorded("optim_step", seq_id=seq + 1))
    made.append(house.recorded("save", seq_id=first + 4, path=f"after-{first}"))
    return made


def results(house: House, promises: list[Any]) -> list[Any]:
    found = []
    for promise in promises:
        answer = house.post("retrieve_future", {"request_id": promise["request_id"]})
        assert answer.status_code == 200, answer.text
        made = metrics_of(answer.content) if "protobuf" in answer.headers["content-type"] else answer.json()
        assert "error" not in made, made
        found.append(str(made).replace(house.session, "SESSION"))
    return found


@pytest.mark.parametrize("what", ["request", "result", "state", "checkpoint", "sampler"])
def test_a_slow_disk_of_one_tenant_stops_nobody_else(
    what: str, folder: Path, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, disk, what)
    slow = served_in(folder, tmp_path / "checkpoints")
    quick = slow.of("tml-bob")
    stopped = threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            if not slow.tinker.turn():
                time.sleep(0.001)

    with slow.client, ThreadPoolExecutor(3) as pool:  # one event loop for all requests
        computing = pool.submit(compute)
        try:
            for house in (slow, quick):
                house.begin()
                assert house.recorded("model")["model_id"]
            disk.name = slow.session
            sent: Future[Any] = pool.submit(lambda: asked(slow, what))
            assert disk.met.wait(60)
            told = pool.submit(lambda: results(quick, steps(quick, 1))).result(60)
            assert not sent.done(), "the slow one is not told before all is written"
            disk.release()
            assert sent.result(60) == told, "bit for bit what the other tenant got"
        finally:
            disk.release()
            stopped.set()
        computing.result(60)
        slow.settle()


def asked(house: House, what: str) -> list[Any]:
    if what == "sampler":
        house.recorded("base_sampler")
    return results(house, steps(house, 1))


def test_what_follows_a_load_waits_with_it(
    folder: Path, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model loads a checkpoint of another one that is being written. Its later requests are sent at once."""
    plant(monkeypatch, disk, "checkpoint")
    house = served_in(folder, tmp_path / "checkpoints")
    house.begin()
    first, second = f"{house.session}:train:0", f"{house.session}:train:1"
    for number in (0, 1):
        house.result(house.recorded("model", model_seq_id=number))
    path = house.result(house.recorded("save", seq_id=1))["path"]

    def program(seq: int) -> list[Any]:
        update = {"model_id": second, "path": path}
        return [
            house.recorded("load", seq_id=seq, **update),
            house.post("forward_backward", content=house.message("cross_entropy", seq + 1, second)).json(),
            house.recorded("optim_step", seq_id=seq + 2, model_id=second),
            house.post("forward_backward", content=house.message("forward", seq + 3, second)).json(),
        ]

    expected = [house.result(promise) for promise in program(1)]
    disk.name = first
    held = house.recorded("save", seq_id=2, path="two")
    promises = program(5)
    own = house.tinker.state._of_tenant(tenant_of(house.key)).jobs
    while house.tinker.turn():
        pass
    assert disk.met.wait(60) and not any(own[one["request_id"]].future.done() for one in promises)
    disk.release()
    assert "path" in house.result(held)
    assert [house.result(promise) for promise in promises] == expected


def test_the_rename_of_one_tenant_stops_nobody_else(
    folder: Path, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's first request looks for checkpoints under an older name."""
    rename = Checkpoints.rename_tenant

    def slow_rename(self: Checkpoints, before: str, tenant: str) -> None:
        disk.write(tenant)
        rename(self, before, tenant)

    monkeypatch.setattr(Checkpoints, "rename_tenant", slow_rename)
    slow = served_in(folder, tmp_path / "checkpoints")
    disk.name = tenant_of(slow.key)
    with slow.client, ThreadPoolExecutor(2) as pool:
        try:
            sent = pool.submit(slow.begin)
            assert disk.met.wait(60)
            assert pool.submit(slow.of("tml-bob").begin).result(20)
            assert not sent.done()
        finally:
            disk.release()
        assert sent.result(60)


@pytest.mark.parametrize("second", ["save", "state"])
def test_a_tenant_s_models_write_their_weights_one_after_another(
    second: str, folder: Path, tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So memory holds one copy of them, and each save is counted before the next one asks for room."""
    house = served_in(folder, tmp_path / "checkpoints")
    house.begin()
    models = [f"{house.session}:train:{number}" for number in (0, 1)]
    for number in (0, 1):
        house.result(house.recorded("model", model_seq_id=number))
    write, begun = Session.write, [threading.Event(), threading.Event()]

    def slow_write(self: Session, directory: Path, **given: Any) -> Path:
        begun[begun[0].is_set()].set()
        disk.write(disk.name)
        return write(self, directory, **given)

    monkeypatch.setattr(Session, "write", slow_write)
    disk.name = "any"
    promises = [house.recorded("save", seq_id=1)]
    if second == "save":
        state = house.tinker.state
        monkeypatch.setattr(state, "quota", lambda tenant: Quota(bytes=state.live_bytes(tenant) + 1))
        promises.append(house.recorded("save", seq_id=1, model_id=models[1]))
    else:
        monkeypatch.setattr(jobs, "_STATE_SECONDS", 0.0)
        house.post("forward_backward", content=house.message("cross_entropy", 1, models[1]))
        promises.append(house.recorded("optim_step", seq_id=2, model_id=models[1]))
    while house.tinker.turn():
        pass
    assert begun[0].wait(60) and not begun[1].wait(0.3)
    disk.release()
    first, other = [house.result(promise) for promise in promises]
    assert begun[1].is_set() == (second == "state")
    if second == "save":
        assert sorted(["path" in first, "path" in other]) == [False, True]
        assert "is your quota" in str(first) + str(other)
    else:
        assert "path" in first and other["metrics"]["step"] == 1
