"""A rank that is killed, fails or stalls ends all of them, by name, and nobody hangs."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from documents import make_documents
from ranks.cases import train_and_do
from ranks.test_train_over_ranks import config
from selection import long_except
from small_runs import read_lines, write_rollouts
from truestep.config.schema import Config
from truestep.ranks import processes, watch
from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.group import Ranks, join
from truestep.ranks.launch import run_ranks, start_ranks
from truestep.ranks.lifelines import Lifelines
from truestep.ranks.watch import ENDED_BY_ANOTHER, RankState, verdict
from truestep.rollouts.source import FileSource
from truestep.run.train import train
from truestep.step.plan.ahead import PlansAhead
from truestep.step.plan.plan import StepRule
from truestep.step.plan.queue import PlanQueue

TIMEOUT = 3.0


def seen(rank: int, number: int, idle: float, silent: float = 0.0, phase: str = "working", **more: Any) -> RankState:
    return RankState(rank, number, phase, since=100.0, idle=idle, silent=silent, **more)


def test_nobody_stands_still() -> None:
    assert verdict(seen(0, 5, 2.9, waits="ranks"), [seen(1, 4, 2.0)], 3.0, 10.0) is None


def test_a_rank_that_waits_for_one_that_works_goes_on() -> None:
    assert verdict(seen(0, 5, 500.0, waits="ranks"), [seen(1, 4, 0.5)], 3.0, 10.0) is None


def test_the_rank_that_is_waited_for_is_named_by_every_other() -> None:
    late = seen(1, 4, 3.4, phase="reading", place="files.py:7 in read", waiting_for="the disk to read a.jsonl")
    said = verdict(seen(0, 5, 3.1, waits="ranks"), [late, seen(2, 5, 3.2, waits="ranks")], 3.0, 10.0)
    assert said == (
        "rank 1 has made no progress for 3 s, reading for 100 s, waiting for the disk to read a.jsonl, at files.py:7 "
        "in read, and the others wait for it (schedule.stall_timeout: 3)"
    )


def test_a_rank_that_stands_still_is_named_while_another_works() -> None:
    said = verdict(seen(0, 5, 0.1), [seen(1, 5, 4.0)], 3.0, 10.0)
    assert said == "rank 1 has made no progress for 4 s, working for 100 s (schedule.stall_timeout: 3)"


def test_a_source_has_time_to_say_more() -> None:
    assert verdict(seen(0, 5, 4.0), [], 3.0, 10.0, grace=2.0) is None
    said = verdict(seen(0, 5, 5.1, waiting_for="documents"), [], 3.0, 10.0, grace=2.0)
    assert said == (
        "the run has made no progress for 5 s, working for 100 s, waiting for documents (schedule.stall_timeout: 3)"
    )


def test_one_process_that_waits_for_its_device_stands_still_too() -> None:
    said = verdict(seen(0, 5, 4.0, waits="device"), [], 3.0, 10.0) or ""
    assert said.startswith("the run has made no progress for 4 s, working for 100 s, waiting for its device")


def test_a_device_may_wait_for_the_rank_that_stands_still() -> None:
    said = verdict(seen(0, 5, 4.0, waits="device"), [seen(1, 5, 4.0)], 3.0, 10.0) or ""
    assert said.startswith("rank 1 has") and "the others wait for it" in said


def test_a_rank_that_nothing_is_heard_of_is_gone() -> None:
    said = verdict(seen(0, 5, 0.1), [seen(1, 4, 20.0, silent=11.0, phase="computing step 4")], 600.0, 10.0)
    assert said == "rank 1 is gone: nothing was heard of it for 11 s, and last it was computing step 4"


def test_a_rank_whose_process_has_ended_is_gone_at_once() -> None:
    said = verdict(seen(0, 5, 0.1), [seen(1, 4, 0.2, silent=0.2, process="gone")], 600.0, 600.0)
    assert said == "rank 1 is gone: its process has ended, and last it was working"


def test_a_silent_rank_whose_process_is_there_is_not_gone() -> None:
    assert verdict(seen(0, 5, 0.1), [seen(1, 4, 50.0, silent=50.0, process="there")], 600.0, 10.0) is None
    said = verdict(seen(0, 5, 0.1), [seen(1, 4, 700.0, silent=700.0, process="stopped")], 600.0, 10.0) or ""
    assert "rank 1 has made no progress for 700 s, working for 100 s, its process stopped by a signal" in said


def test_a_rank_that_is_done_is_not_missed() -> None:
    assert verdict(seen(0, 5, 0.1), [seen(1, 9, 50.0, silent=50.0, phase="done", process="gone")], 600.0, 10.0) is None


def test_all_wait_for_each_other_and_the_one_that_is_behind_is_named() -> None:
    waiting = seen(0, 5, 4.0, waits="ranks")
    said = verdict(waiting, [seen(1, 4, 4.0, waits="ranks")], 3.0, 10.0) or ""
    assert said.startswith("rank 1 has made") and "the others wait for it" in said
    said = verdict(waiting, [seen(1, 5, 4.0, waits="ranks")], 3.0, 10.0) or ""
    assert "rank 0 has" in said and "rank 1 has" in said


@pytest.mark.parametrize(
    ("what", "phase", "expected"),
    long_except(
        [
            ("kill", "computing step 2", "rank 1 is gone"),
            ("raise", "computing step 2", "rank 1 failed: ZeroDivisionError: planted"),
            ("stall", "computing step 2", "rank 1 has made no progress"),
            ("stall", "waiting for the documents of step 3", "s, waiting for the documents of step 3 for "),
        ],
        ("kill", "computing step 2", "rank 1 is gone"),
        ("stall", "computing step 2", "rank 1 has made no progress"),
    ),
)
def test_one_rank_ends_all(
    what: str,
    phase: str,
    expected: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    given = config(
        tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run", schedule={"stall_timeout": TIMEOUT}
    )
    processes, folder, store = start_ranks(3, train_and_do, (given, 1, phase, what))
    survivors = [process for rank, process in enumerate(processes) if rank != 1 or what == "raise"]
    for process in survivors:  # one that stalls does so for far longer
        process.join(timeout=200)
    if what == "stall":
        processes[1].kill()
    processes[1].join()
    assert all(process.exitcode for process in survivors), [process.exitcode for process in processes]
    said = "".join(file.read_text(encoding="utf-8") for file in folder.iterdir())
    assert expected in said
    if what == "stall":
        assert f"s, {phase} for " in said and "at cases.py:" in said and "in caught, and the others wait for it" in said
    done = [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")]
    assert done in ([1], [1, 2]), "nothing is computed without the rank that is missing"
    assert {process.exitcode for process in survivors if process is not processes[1]} <= {1, ENDED_BY_ANOTHER}
    shutil.rmtree(folder)
    del store


def _disagree() -> None:
    ranks = join(RankLayout(), device="cpu", stall_timeout=30)
    documents = make_documents([3, 4, 5, 6] if ranks.rank == 2 else [5, 6, 7, 8])
    queue = PlanQueue(FileSource(documents), StepRule(2, False, 1, 1, 40, 3))
    PlansAhead(queue, ranks, overlap=False).next()


def test_ranks_that_plan_another_step_stop_before_anything_is_computed() -> None:
    with pytest.raises(RankError, match=r"ranks \[2\] planned another step after document 0 than the rest"):
        run_ranks(3, _disagree)


def test_one_process_needs_nobody() -> None:
    assert Ranks().gather("mine") == ["mine"] and Ranks().share(lambda: 3) == 3


class _Store:
    """A store of one process."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.entries[key]


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_connection_that_closes_tells_of_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store: Any = _Store()
    first, second, third = (Lifelines(rank, store) for rank in range(3))
    assert second.ended() == set(), "the first rank does not listen yet"
    for lines in (first, second, third, first):
        assert lines.ended() == set()
    port, _ = json.loads(store.get("truestep/lifelines"))
    with socket.create_connection(("127.0.0.1", port)) as stranger:  # without the key
        stranger.sendall(b"0123456789abcdef0123456789abcdef 2")
        until(lambda: first.ended() == set() and not first._unknown)
    second.close()
    until(lambda: first.ended() == {1})
    assert third.ended() == set()
    first.close()
    until(lambda: third.ended() == {0})
    third.close()


def _rank_of_another_machine(given: Any, who: int) -> None:
    rank = int(os.environ["RANK"])
    for module in (watch, processes):
        module.machine = lambda: f"machine {rank}"
    honest = watch.Watch.phase

    def caught(self: watch.Watch, name: str) -> None:
        honest(self, name)
        if name == "computing step 2" and rank == who:
            until(lambda: self._lifelines is not None and bool(self._lifelines._open))
            time.sleep(3)  # until the first rank has looked
            os.kill(os.getpid(), signal.SIGKILL)

    watch.Watch.phase = caught
    train(Config.model_validate(given), Console(file=io.StringIO()))


@pytest.mark.long
def test_a_rank_of_another_machine_is_gone_when_its_connection_closes(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The ranks think that they are on machines of their own, so that none sees another's process."""
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    given = config(tiny_model("llama"), tmp_path / "rollouts.jsonl", tmp_path / "run", schedule={"stall_timeout": 500})
    ranks, folder, _store = start_ranks(3, _rank_of_another_machine, (given, 1))
    for process in ranks:
        process.join(timeout=200)
    assert all(process.exitcode for process in ranks), [process.exitcode for process in ranks]
    said = (folder / "0").read_text(encoding="utf-8")
    assert "rank 1 is gone: its process has ended" in said
    shutil.rmtree(folder)
