"""Completions that a worker rates one after another: none costs another its reward, its time or its secrecy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from truestep.environments import frames
from truestep.environments.process import Worker, WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater
from truestep.environments.relay import Relay

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
    """Rate the first completion, which is rated alone."""
    rater.submit(Prompt("good", "p", {}, (1,)), "a", "0").result(PATIENCE)


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


def test_each_rating_is_its_own() -> None:
    with rating("server.rewards:choosy", 1) as rater:
        warm(rater)
        with rater._changed:
            futures = [rater.submit(Prompt("p", "p", {}, (1,)), "x" * number, "0") for number in range(1, 101)]
        assert outcomes(futures) == [float(number) for number in range(1, 101)]


@pytest.mark.parametrize("attack", ["exits_at_once", "guessed_frames", "kills_its_parent", "closes_every_descriptor"])
def test_what_loses_its_worker_costs_itself_alone(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if attack == "kills_its_parent":  # which an isolated reward cannot
        monkeypatch.setattr("truestep.environments.process.isolation_refused", lambda: "not here")
    with rating("hostile_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        fields: list[dict[str, Any]] = [{} for _ in range(12)]
        fields[5] = {"attack": attack, "place": str(tmp_path)}
        got = outcomes(at_once(rater, fields))
    assert "the reward" in str(got.pop(5)) and got == [0.2] * 11


def test_the_others_are_out_of_reach(tmp_path: Path) -> None:
    with rating("hostile_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        fields = [{"attack": "looks_for_other_requests", "place": str(tmp_path)} for _ in range(8)]
        assert outcomes(at_once(rater, fields)) == [0.25] * 8


def test_a_slow_one_holds_up_nobody_behind_it(tmp_path: Path) -> None:
    """The first waits for the last one, which another worker must rate meanwhile."""
    with rating("batched_reward:reward", 2, place=tmp_path) as rater:
        warm(rater)
        fields = [{"waits_for": str(tmp_path / "done")}, {}, {}, {"makes": str(tmp_path / "done")}]
        assert outcomes(at_once(rater, fields)) == [1.0] * 4


@pytest.mark.long
def test_each_has_the_whole_time() -> None:
    with rating("batched_reward:reward", 1, timeout=6.0) as rater:
        warm(rater)
        got = outcomes(at_once(rater, [{"seconds": 2.5}, {"seconds": 2.5}, {"seconds": 90.0}, {}]))
    assert got == [1.0, 1.0, "the reward took longer than sampler.reward_timeout: 6 s", 1.0]


def test_what_waits_can_be_cancelled(tmp_path: Path) -> None:
    with rating("batched_reward:reward", 1, place=tmp_path) as rater:
        warm(rater)
        first, second, third = at_once(rater, [{"waits_for": str(tmp_path / "done")}, {}, {}])
        while not first.running():
            time.sleep(0.01)
        assert second.cancel() and not first.cancel()
        (tmp_path / "done").touch()
        assert first.result(PATIENCE) == third.result(PATIENCE) == 1.0


@pytest.mark.parametrize("more", [b"\0", frames.encode({"number": 2}), b"\xff" * 9000])
def test_what_is_said_before_it_is_asked_ends_the_worker(more: bytes) -> None:
    """Nobody is rated by a worker that has sent more than its answer."""
    worker = Worker(WorkerOptions("batched_reward:reward", 60.0, 2**29))
    try:
        worker.start()
        assert worker.rate({"prompt": "p", "completion": "c", "fields": {}, "seed": "0"}) == 1.0 and worker.usable()
        worker._channel._buffer += more
        assert not worker.usable()
    finally:
        worker.end()


def test_what_a_completion_left_behind_is_killed_before_its_answer_is_passed_on() -> None:
    channel, run = frames.connected()
    connection, worker = frames.connected()
    run.setblocking(False)
    found: list[bytes] = []

    def answered() -> None:
        with contextlib.suppress(BlockingIOError):
            found.append(run.recv(100))
        found.append(b"killed")

    relay = Relay(channel, connection, lambda: None, answered)
    ready = {channel.fileno(), connection.fileno()}
    with run, worker:
        worker.send(b"imported")
        assert relay.turn(ready) and relay.started and run.recv(100) == b"imported" and not found
        worker.send(b"answer")
        assert relay.turn(ready) and found == [b"killed"] and run.recv(100) == b"answer"
        run.send(b"request")
        assert relay.turn(ready) and worker.recv(100) == b"request"
        run.close()
        assert not relay.turn(ready), "the run is gone"
