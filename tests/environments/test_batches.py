"""Completions that are sent to a worker many at a time: none costs another its reward, its time or its secrecy."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from truestep.environments import frames, valve
from truestep.environments.batch_size import MOST, BatchSizer
from truestep.environments.process import Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater
from truestep.environments.valve import Valve

PATIENCE = 240.0  # seconds, against what hangs


@contextlib.contextmanager
def rating(reward: str, workers: int, timeout: float = 60.0, place: Path | None = None) -> Iterator[Rater]:
    writable = () if place is None else (str(place),)
    if place is not None:
        place.chmod(0o777)
    rater = Rater(WorkerOptions(reward, timeout, 2**29, writable=writable), workers)
    try:
        yield rater
    finally:
        rater.close()


def warm(rater: Rater) -> None:
    """Rate until completions are sent many at a time: it may take a while on a busy machine."""
    good = Prompt("good", "p", {}, (1,))
    rater.submit(good, "a", "0").result(PATIENCE)
    rater._sizer._usual = 1e-6


def at_once(rater: Rater, fields: list[dict[str, Any]], completion: str = "a b") -> list[Future[float]]:
    """Submit before any thread can take some."""
    with rater._changed:
        return [
            rater.submit(Prompt(str(number), "p", own, (1,)), completion, str(number))
            for number, own in enumerate(fields)
        ]


def outcomes(futures: list[Future[float]]) -> list[float | str]:
    assert not wait(futures, PATIENCE).not_done
    return [str(error) if (error := future.exception(PATIENCE)) is not None else future.result() for future in futures]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many completions each worker was given in one go."""
    found: list[int] = []
    rate = Worker.rate

    def counted(self: Worker, requests: Any) -> Any:
        found.append(len(requests))
        return rate(self, requests)

    monkeypatch.setattr(Worker, "rate", counted)
    return found


def test_quick_ratings_go_in_batches_and_each_gets_its_own(sizes: list[int]) -> None:
    with rating("server.rewards:choosy", 1) as rater:
        warm(rater)
        with rater._changed:
            futures = [rater.submit(Prompt("p", "p", {}, (1,)), "x" * number, "0") for number in range(1, 101)]
        assert outcomes(futures) == [float(number) for number in range(1, 101)]
    assert sizes[0] == 1 and max(sizes) == MOST


def test_slow_ratings_go_one_at_a_time() -> None:
    sizer = BatchSizer()
    assert sizer.batch == 1, "nothing is known"
    sizer.note(200, 200 * 1e-4)
    assert sizer.batch == MOST
    sizer.note(1, 3600.0)
    assert sizer.batch == 1
    sizer.note(1, 1e-4)
    assert sizer.batch == 1, "one quick rating among slow ones says little"
    sizer.note(100, 100 * 2e-3)
    assert sizer.batch == 4


@pytest.mark.parametrize("attack", ["exits_at_once", "guessed_frames", "kills_its_parent", "closes_every_descriptor"])
def test_what_loses_its_worker_in_a_batch_costs_itself_alone(
    attack: str, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if attack == "kills_its_parent":  # which an isolated reward cannot
        monkeypatch.setattr("truestep.environments.process.isolation_refused", lambda: "not here")
    with rating("hostile_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        fields: list[dict[str, Any]] = [{} for _ in range(12)]
        fields[5] = {"attack": attack, "place": str(tmp_path)}
        got = outcomes(at_once(rater, fields))
    assert "the reward" in str(got.pop(5)) and got == [0.2] * 11
    assert max(sizes) == 12


def test_the_others_of_a_batch_are_out_of_reach(tmp_path: Path, sizes: list[int]) -> None:
    with rating("hostile_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        fields = [{"attack": "looks_for_other_requests", "place": str(tmp_path)} for _ in range(8)]
        assert outcomes(at_once(rater, fields)) == [0.25] * 8
    assert max(sizes) == 8


def test_a_slow_one_holds_up_nobody_behind_it(tmp_path: Path, sizes: list[int]) -> None:
    """The first waits for the last of its own batch, which another worker must rate meanwhile."""
    with rating("batched_reward:reward", 2, place=tmp_path) as rater:
        warm(rater)
        fields = [{"waits_for": str(tmp_path / "done")}, {}, {}, {"makes": str(tmp_path / "done")}]
        assert outcomes(at_once(rater, fields)) == [1.0] * 4
    assert max(sizes) == 4


@pytest.mark.long
def test_each_of_a_batch_has_the_whole_time(sizes: list[int]) -> None:
    with rating("batched_reward:reward", 1, timeout=6.0) as rater:
        warm(rater)
        got = outcomes(at_once(rater, [{"seconds": 2.5}, {"seconds": 2.5}, {"seconds": 90.0}, {}]))
    assert got == [1.0, 1.0, "the reward took longer than sampler.reward_timeout: 6 s", 1.0]
    assert max(sizes) == 4


def test_what_waits_in_a_batch_can_be_cancelled(tmp_path: Path) -> None:
    with rating("batched_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        first, second, third = at_once(rater, [{"waits_for": str(tmp_path / "done")}, {}, {}])
        while not first.running():
            time.sleep(0.01)
        assert second.cancel() and not first.cancel()
        (tmp_path / "done").touch()
        assert first.result(PATIENCE) == third.result(PATIENCE) == 1.0


# ---- the valve alone


class Ends:
    """A valve, with its worker and its run in this process."""

    def __init__(self) -> None:
        run, self.run = frames.connected()
        worker, self.worker = frames.connected()
        for end in (self.run, self.worker):
            end.setblocking(False)
        self.said: list[dict[str, Any]] = []
        self.between = 0
        self.valve = Valve(run, worker, self._count, self.said.append)
        self.inner = (run.fileno(), worker.fileno())

    def _count(self) -> None:
        self.between += 1

    def turn(self) -> bool:
        return self.valve.turn(set(self.inner))

    def worker_has(self) -> bytes:
        return received(self.worker)

    def run_has(self) -> bytes:
        return received(self.run)


def received(end: socket.socket) -> bytes:
    try:
        return end.recv(2**16)
    except BlockingIOError:
        return b"nothing"


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    made.worker.send(frames.framed(b"imported"))
    made.turn()
    assert made.run_has() == frames.framed(b"imported") and not made.said
    yield made
    made.run.close()
    made.worker.close()


def test_a_request_is_handed_on_when_the_last_one_is_answered(ends: Ends) -> None:
    first, second = (frames.framed(body) for body in (b"first", b"second"))
    ends.run.send(first + second)
    ends.turn()
    assert ends.worker_has() == first
    ends.turn()
    assert ends.worker_has() == b"nothing"
    ends.worker.send(frames.framed(b"one"))
    ends.turn()
    assert ends.worker_has() == second and ends.between == 1
    ends.worker.send(frames.framed(b"two"))
    ends.turn()
    assert ends.run_has().endswith(frames.framed(b"two")) and ends.between == 2
    assert sum(message["rated"] for message in ends.said) == 2


@pytest.mark.parametrize("more", [b"\0", frames.framed(b"two"), b"\xff" * 9000])
def test_a_worker_that_says_too_much_is_asked_nothing_more(more: bytes, ends: Ends) -> None:
    ends.run.send(frames.framed(b"first") + frames.framed(b"second"))
    ends.turn()
    ends.worker_has()
    ends.worker.send(frames.framed(b"one") + more)
    ends.turn()
    assert ends.worker_has() == b"nothing"
    assert ends.run_has() == frames.framed(b"one") + more, "the run judges what was said"
    assert ends.run_has() == b"", "and waits for no more of it"


def test_an_answer_before_its_request_was_whole_is_too_early(ends: Ends) -> None:
    ends.run.setblocking(True)
    ends.run.settimeout(PATIENCE)
    data = memoryview(frames.framed(b"x" * 2**22))
    while data:
        data = data[ends.run.send(data[: 2**14]) :]
        ends.turn()
    ends.worker.send(frames.framed(b"one"))
    ends.turn()
    ends.run.setblocking(False)
    assert ends.run_has() == frames.framed(b"one") and ends.run_has() == b""


def test_what_waits_behind_a_slow_one_is_given_back(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.run.send(b"".join(frames.framed(body) for body in (b"first", b"second", b"third")))
    ends.turn()
    monkeypatch.setattr(valve, "PATIENCE", 0.0)
    ends.turn()
    assert ends.said == [{"returned": [2, 3]}]
    ends.worker_has()
    ends.worker.send(frames.framed(b"one"))
    ends.turn()
    assert ends.worker_has() == b"nothing" and ends.run_has() == frames.framed(b"one")


def test_a_run_that_is_gone_ends_it(ends: Ends) -> None:
    ends.run.close()
    assert not ends.turn()
