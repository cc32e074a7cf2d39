"""A rank that is killed, fails or stalls ends all of them, by name, and nobody hangs."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from documents import make_documents
from ranks.cases import train_and_do
from ranks.test_train_over_ranks import config
from selection import long_except
from small_runs import read_lines, write_rollouts
from truestep.errors import TruestepError
from truestep.plan.exhausted import MemoryExhaustedError
from truestep.process import progress
from truestep.ranks.axes import RankError, RankLayout
from truestep.ranks.elastic import SHARES_STORE, Agent, RankLostError
from truestep.ranks.group import NoDeviceError, Ranks, join
from truestep.ranks.launch import run_ranks, start_ranks
from truestep.ranks.watch import ENDED_BY_ANOTHER, RankState, Watch, ends_run, lost_ranks, verdict
from truestep.rollouts.source import FileSource
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
    with pytest.raises(RankError, match=r"after document 0 ranks 2 planned another step than the rest"):
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


TWO = RankLayout(data_shard=2)
AGENT = Agent(number=os.getpid(), least=1, most=2)


def watch_of(store: Any, rank: int = 1, timeout: float = 600.0, agent: Agent | None = AGENT) -> Watch:
    made = Watch(Ranks(rank=rank, layout=TWO), timeout, agent)
    made._store = store
    return made


class _Exits(Watch):
    """A watch that notes why it would end the process."""

    reasons: tuple[str, ...] = ()

    def _exit(self, reason: str, code: int) -> None:
        self.reasons += (reason,)
        self._ended.set()


class _Alive(Agent):
    @property
    def gone(self) -> bool:
        return False


def guarded(agent: Agent, rank: int = 1) -> _Exits:
    made = _Exits(Ranks(rank=rank, layout=TWO), 600.0, agent)
    made._beat, made._silence = 0.01, 0.1
    threading.Timer(2.0, made._ended.set).start()
    return made


def test_a_store_that_does_not_answer_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process or the machine of rank 0 stands still: the watch's thread waits for its store without end."""
    stands = guarded(_Alive(1, 1, 2))
    stands._guard(_Alive(1, 1, 2))
    assert len(stands.reasons) == 1 and "the store of rank 0 has not answered for" in stands.reasons[0]
    for held in (guarded(_Alive(1, 1, 2), rank=0), guarded(_Alive(1, 1, 2))):
        if held._ranks.rank == 1:
            monkeypatch.setenv(SHARES_STORE, "True")  # the launcher has it
        threading.Timer(0.5, held._ended.set).start()
        held._guard(_Alive(1, 1, 2))
        assert held.reasons == ()


def test_a_launcher_that_has_ended_is_noticed_while_the_store_stands_still() -> None:
    ended = guarded(Agent(2**22 + 1, 1, 2))
    ended._guard(Agent(2**22 + 1, 1, 2))
    assert ended.reasons == ("its launcher has ended",)


def test_a_store_that_answers_ends_nothing() -> None:
    store = _Store()
    first, second = watch_of(store, rank=0), watch_of(store)
    for each in (first, second, first):
        assert each._reason_to_end(60.0)[0] is None
    assert second._answers == 1 and first._answers == 2


def test_without_an_elastic_launcher_nothing_is_as_if_there_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARES_STORE, raising=False)
    plain = watch_of(None, rank=0, agent=None)
    assert plain._silence == 600.0 and not plain._holds_store and plain._next == ""
    before = set(threading.enumerate())
    alone = Watch(Ranks(), 600.0)
    with alone.watching():
        assert set(threading.enumerate()) - before == {alone._thread}


def test_silence_counts_after_a_minute_or_five_beats() -> None:
    assert watch_of(None)._silence == 60.0 and watch_of(None, timeout=20.0)._silence == 20.0
    many = Watch(Ranks(rank=1, layout=RankLayout(data_shard=1024)), 600.0, AGENT)
    assert many._silence == 5 * many._beat == 80.0


def test_a_rank_that_is_lost_in_its_first_second_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would else wait for a cause that nobody knows, and be killed meanwhile."""
    store = _Store()
    monkeypatch.setattr("truestep.ranks.watch.dist.TCPStore", lambda *given, **named: store)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    lost = Watch(Ranks(rank=1, layout=TWO), 600.0)
    lost._beat = 600.0
    with pytest.raises(ZeroDivisionError), lost.watching():
        said = dict(store.entries)
        lost._stopped.set()
        raise ZeroDivisionError
    assert set(said) == {"truestep/rank/1"}


def test_the_ranks_that_failed_are_known() -> None:
    store = _Store()
    watch_of(store, rank=0)._report_failure(ZeroDivisionError("planted"))
    other = watch_of(store)
    assert other._reason_to_end(60.0)[0] == "rank 0 failed: ZeroDivisionError: planted" and other.lost == [0]
    assert not other.over
    store = _Store()
    watch_of(store, rank=0)._report_failure(TruestepError("the data has no documents"))
    other = watch_of(store)
    assert other._told() is not None and other.over

    class Gone(_Store):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection reset by peer")

    other = watch_of(Gone())
    assert "the store of rank 0 cannot be reached" in (other._reason_to_end(60.0)[0] or "") and other.lost == [0]


@pytest.mark.parametrize(
    ("own", "other", "lost"),
    [
        (seen(0, 5, 0.1), seen(1, 4, 0.2, process="gone"), [1]),
        (seen(0, 5, 0.1), seen(1, 4, 90.0, silent=90.0), []),  # a connection may be the cause
        (seen(0, 5, 4.0, waits="ranks"), seen(1, 4, 4.0), [1]),
        (seen(0, 5, 4.0), seen(1, 5, 0.1), [0]),
        (seen(0, 5, 4.0, waits="ranks"), seen(1, 5, 4.0, waits="ranks"), []),  # any of them, or none
    ],
)
def test_which_ranks_have_failed(own: RankState, other: RankState, lost: list[int]) -> None:
    assert verdict(own, [other], 3.0, 60.0) is not None
    assert lost_ranks(own, [other], 3.0, 60.0) == lost


def test_the_ranks_that_failed_are_told_with_the_reason() -> None:
    store = _Store()
    progress.made("phases")
    late = watch_of(store, rank=0, timeout=40.0)
    late._report(seen(0, 4, 50.0, waits=""))
    finds = watch_of(store, timeout=40.0)
    reason, _ = finds._reason_to_end(60.0)
    assert reason is not None and "rank 0 has made no progress" in reason and finds.lost == [0]
    told = watch_of(store, timeout=40.0)
    assert told._told() == reason and told.lost == [0]


@pytest.mark.parametrize(
    ("error", "over"),
    [
        (TruestepError("the data"), True),
        (MemoryExhaustedError("the GPU's memory ran out"), False),
        (NoDeviceError("local rank 3 has no GPU"), False),
        (RankLostError("rank 1 is gone"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_errors_of_one_machine_do_not_end_the_run(error: Exception, over: bool) -> None:
    assert ends_run(error) == over
