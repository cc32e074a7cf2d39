"""What is written of a generation: who left, why, what was lost; and which agents are ended."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from small_runs import write_lines
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.plan.exhausted import MemoryExhaustedError
from truestep.process import progress
from truestep.ranks.axes import RankLayout
from truestep.ranks.elastic import Agent, RankLostError
from truestep.ranks.group import ALONE, NoDeviceError, Ranks
from truestep.ranks.watch import Watch
from truestep.run import elastic as generations
from truestep.run import train as training
from truestep.run.assemble.rewards import ranks_of_machine
from truestep.run.checkpoint.checksums import MANIFEST
from truestep.run.checkpoint.store import CheckpointStore
from truestep.run.directory import RunDirectory
from truestep.run.elastic import GENERATIONS, Elastic
from truestep.weights.tensor_parts import FOLDER

AGENT = Agent(number=1, least=1, most=4)


class Ended(Agent):
    """An agent that is not there, and notes that it would be ended."""

    ends: ClassVar[list[int]] = []

    def end(self) -> None:
        self.ends.append(self.number)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ends: list[int] = []
    monkeypatch.setattr(Ended, "ends", ends)
    return ends


def part(path: Path, *agents: str, agent: Agent = AGENT) -> Elastic:
    made = Elastic(agent, path)
    made.agents = agents
    return made


def begin(elastic: Elastic) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Write the line of a generation that goes on from the disk; return it and the one before."""
    lines, step = elastic._before()
    return elastic._begin(lines, step), lines[-1] if lines else None


def note(run: Path, generation: str, *failed: str) -> None:
    (run / f".generation-ended-{generation}").write_text(json.dumps({"reason": "it failed", "failed": failed}))


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """What a generation does with SIGTERM, and with the number of ranks of this machine, ends with its test."""
    handler, ranks = signal.getsignal(signal.SIGTERM), os.environ.get("LOCAL_WORLD_SIZE")
    yield
    signal.signal(signal.SIGTERM, handler)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if ranks is not None:
        os.environ["LOCAL_WORLD_SIZE"] = ranks


@pytest.fixture(autouse=True)
def meets(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the ranks of a generation meet at this port."""
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    return lambda port: monkeypatch.setenv("MASTER_PORT", str(port))


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    (folder / FOLDER).mkdir(parents=True)
    for file in (folder / FOLDER / "state.json", folder / MANIFEST):
        file.write_text("{}")


def steps(run: Path, last: int, ago: float) -> None:
    """A run that has made steps of 8 documents, each in 2 seconds, the last one so many seconds ago. Its generations
    began long before."""
    began = [json.loads(line) | {"time": 0.0} for line in (run / GENERATIONS).read_text().splitlines()]
    write_lines(run / GENERATIONS, began)
    numbers = range(1, last + 1)
    write_lines(run / "ledger.jsonl", [{"step": n, "documents": ["a"], "documents_seen": 8 * n} for n in numbers])
    write_lines(run / "metrics.jsonl", [{"step": n, "step_time": 2.0} for n in numbers])
    os.utime(run / "ledger.jsonl", (time.time() - ago,) * 2)


def test_the_first_generation(tmp_path: Path) -> None:
    line, before = begin(part(tmp_path / "run", "a/1", "b/2"))
    assert before is None and (line["generation"], line["step"], line["agents"]) == (1, 0, ["a/1", "b/2"])
    assert line["left"] == line["joined"] == [] and "lost_seconds" not in line


def test_a_generation_after_a_loss(tmp_path: Path) -> None:
    begin(part(tmp_path, "a/1", "b/2", "c/3"))
    checkpoint(tmp_path, 5)
    steps(tmp_path, 7, ago=100)
    survivor = part(tmp_path, "a/1", "b/2", "c/3")
    survivor.watch = Watch(ALONE, 60)
    survivor.watch.lost = [1]
    survivor.note("rank 1 is gone", own=False)
    survivor.note("rank 0 is gone", own=False)  # the first reason stays
    line, before = begin(part(tmp_path, "a/1", "c/3", "d/4"))
    assert before is not None and line["generation"] == 2
    assert (line["left"], line["joined"], line["failed"]) == (["b/2"], ["d/4"], ["b/2"])
    assert (line["step"], line["lost_steps"], line["lost_documents"]) == (5, 2, 16)
    assert line["lost_seconds"] == pytest.approx(104, abs=30)
    assert line["reason"] == "rank 1 is gone"
    assert list(tmp_path.glob(".generation*")) == []


def test_a_rank_of_an_earlier_generation_leaves_no_note(tmp_path: Path, meets: Callable[[int], None]) -> None:
    """It stood still, and the run may have ended since: nobody would remove the note."""
    begin(first := part(tmp_path, "a/1", "b/2"))
    meets(2)
    begin(second := part(tmp_path, "b/2"))
    meets(1)
    first.note("it was silent", own=False)
    assert list(tmp_path.glob(".generation*")) == []
    for port, elastic in ((2, second), (3, part(tmp_path, "b/2"))):  # the last one, and one that has not begun
        meets(port)
        elastic.note("it failed", own=True)
    assert [note.name for note in sorted(tmp_path.glob(".generation*"))] == [
        f".generation-ended-host-{n}" for n in (2, 3)
    ]


def test_a_generation_at_the_port_of_an_earlier_one_leaves_a_note(tmp_path: Path, meets: Callable[[int], None]) -> None:
    for port in (1, 2):
        meets(port)
        begin(part(tmp_path, "a/1"))
    meets(1)
    third = part(tmp_path, "a/1")
    third.note("it failed", own=True)
    (note,) = tmp_path.glob(".generation*")
    assert note.name == ".generation-ended-host-1"
    begin(third)
    begin(part(tmp_path, "a/1"))  # at this port, too
    third.note("it was silent", own=False)
    assert list(tmp_path.glob(".generation*")) == []


def test_a_run_that_was_started_anew_has_lost_no_time(tmp_path: Path) -> None:
    begin(part(tmp_path, "a/1"))
    checkpoint(tmp_path, 5)
    steps(tmp_path, 7, ago=1e6)
    line, _ = begin(part(tmp_path, "a/9"))
    assert "lost_seconds" not in line and line["left"] == ["a/1"]


@pytest.mark.parametrize("saved", [False, True])
def test_an_agent_that_fails_twice_is_left_out_unless_the_run_got_further(saved: bool, tmp_path: Path) -> None:
    for failure in range(2):
        line, _ = begin(part(tmp_path, "a/1", "b/2"))
        assert line["unfit"] == []
        note(tmp_path, "host-1", "b/2")
        if saved and failure:
            checkpoint(tmp_path, 3)
    line, _ = begin(part(tmp_path, "a/1", "b/2"))
    assert line["unfit"] == ([] if saved else ["b/2"])


@pytest.mark.parametrize(
    ("error", "failed", "over"),
    [
        (TruestepError("the data has no documents"), True, True),
        (RankLostError("rank 1 is gone"), False, False),
        (ZeroDivisionError("planted"), True, False),
        (MemoryExhaustedError("the GPU's memory ran out"), True, False),
        (NoDeviceError("local rank 3 has no GPU"), True, True),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_how_a_generation_ends(
    error: BaseException, failed: bool, over: bool, tmp_path: Path, ended: list[int]
) -> None:
    own = part(tmp_path, agent=Ended(number=1, least=1, most=2))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(type(error)), own.ending():
            raise error
    finally:
        signal.signal(signal.SIGTERM, before)
    line, _ = begin(part(tmp_path, "a/1"))
    assert line["failed"] == ([own.agent.name] if failed else [])
    assert ended == [1] * over, "an error that would come again ends the agent too"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("whose", "ends"), [("host-1", True), ("host-2", False)])
def test_ranks_that_connect_end_with_one_that_cannot(
    whose: str,
    ends: bool,
    last: bool,
    tmp_path: Path,
    ended: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the agent may not start its rank again, it ends too: it would close the run for all."""
    codes, looked = list[int](), threading.Event()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(generations, "_LOOKS", 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), looked.set()))
    with part(tmp_path, agent=Ended(number=1, least=1, most=2, last_start=last)).connecting():
        note(tmp_path, whose, "b/2")
        looked.wait(60 if ends else 0.2)
    assert bool(codes) is ends
    assert bool(ended) is (ends and last)
    said = "error: rank 3 ends: another rank has ended before all were connected: it failed"
    assert (said in capsys.readouterr().err) is ends


@pytest.mark.parametrize("by_error", [False, True])
def test_a_note_that_blocks_keeps_no_rank(by_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network a network disk may hold up a write for ever: the agent is ended before, and the rank after."""
    order: list[str] = []
    monkeypatch.setattr(generations, "_NOTE_TAKES", 0.01)
    monkeypatch.setattr(Agent, "leave_if_cut_off", lambda self: order.append("the agent is ended"))
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (order.append("a note begins"), threading.Event().wait()))
    own = part(tmp_path / "run", "a/1")
    if by_error:
        with pytest.raises(RankLostError), own.ending():
            raise RankLostError("rank 1 is gone")
    else:
        own._before_exit("rank 1 is gone", False)
    assert order == ["the agent is ended", "a note begins"]


def test_a_rank_that_gives_up_connecting_ends_its_agent_where_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's call would never return: `join` then calls what `train` gave it, and the process ends."""
    order: list[str] = []
    data = {"path": "rollouts.jsonl", "advantages": "none"}
    given = Config.model_validate({"model": {"path": "model"}, "data": data, "schedule": {"docs_per_step": 8}})
    monkeypatch.setattr(Agent, "leave_if_cut_off", lambda self: order.append("it looks"))

    def never_connected(config: Config, patience: float, give_up: Callable[[str], None]) -> Ranks:
        assert patience == generations.JOIN_PATIENCE
        give_up("the 2 ranks were not connected in 180 s")
        raise Over

    monkeypatch.setattr(training, "join_ranks", never_connected)
    with pytest.raises(Over):
        training._train(given, Console(quiet=True), "training", (), (), part(tmp_path))
    assert (
        order == ["it looks"] and begin(part(tmp_path, "a/1"))[0]["reason"] == "the 2 ranks were not connected in 180 s"
    )


class Over(BaseException):
    """A process has ended."""


def test_the_first_start_of_a_run_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its directory is made; by the rank that the launcher gave, since none is connected yet."""
    monkeypatch.setenv("RANK", "3")
    run = tmp_path / "runs" / "new"
    with pytest.raises(NoDeviceError), part(run, agent=Ended(number=1, least=1, most=2)).ending():
        raise NoDeviceError("local rank 0 has no GPU")
    line, _ = begin(part(run, "a/1"))
    assert line["reason"] == "rank 3 failed: NoDeviceError: local rank 0 has no GPU"


@pytest.mark.parametrize(
    ("last", "stopped", "notice", "ends"),
    [(False, True, False, 0), (False, True, True, 1), (True, True, False, 1), (True, False, True, 0)],
)
def test_which_stop_ends_the_agent(
    last: bool, stopped: bool, notice: bool, ends: int, tmp_path: Path, ended: list[int]
) -> None:
    file = tmp_path / "notice"
    if notice:
        file.touch()
    before = signal.getsignal(signal.SIGTERM)
    try:
        part(tmp_path, agent=Ended(1, 1, 2, last_start=last)).ended(stopped, file)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(ended) == ends


def test_an_error_of_another_rank_that_ends_the_run_ends_each_agent(tmp_path: Path, ended: list[int]) -> None:
    """The others raise what the watch says: that a rank failed."""
    own = part(tmp_path, agent=Ended(number=1, least=1, most=2))
    own.watch = Watch(ALONE, 60)
    own.watch.over = True
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RankLostError), own.ending():
            raise RankLostError("rank 1 failed: TrainingError: weights that are not finite")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [1]


@pytest.mark.parametrize(("asked", "failed"), [(math.inf, ["b/2"]), (3.0, ["b/2"]), (25.0, [])])
def test_a_rank_that_is_killed_because_it_did_not_stop_is_no_failure(
    asked: float, failed: list[str], tmp_path: Path
) -> None:
    own = part(tmp_path, "a/1", "b/2")
    begin(own)
    own.watch = Watch(ALONE, 60)
    own.watch.lost = [1]
    own.asked_at = lambda: time.monotonic() - asked if asked < math.inf else math.inf
    own.note("rank 1 is gone", own=False)
    assert begin(part(tmp_path, "a/1", "b/2"))[0]["failed"] == failed


def test_a_note_of_an_earlier_generation_is_not_taken(tmp_path: Path, meets: Callable[[int], None]) -> None:
    for port in (1, 2):
        meets(port)
        begin(part(tmp_path, "a/1", "b/2"))
    note(tmp_path, "host-1", "b/2")  # of a rank that was stopped, and went on later
    meets(3)
    assert begin(part(tmp_path, "a/1", "b/2"))[0]["failed"] == []
    note(tmp_path, "host-1", "b/2")
    note(tmp_path, "host-3", "a/1")
    meets(4)
    assert begin(part(tmp_path, "a/1", "b/2"))[0]["failed"] == ["a/1"]
    note(tmp_path, "host-5", "b/2")  # of a generation that ended before its line
    meets(6)
    assert begin(part(tmp_path, "a/1", "b/2"))[0]["failed"] == ["b/2"]


def test_steps_that_were_lost_are_counted_once(tmp_path: Path) -> None:
    """A generation may end before it has rolled the files back."""
    begin(part(tmp_path, "a/1"))
    checkpoint(tmp_path, 5)
    steps(tmp_path, 7, ago=100)
    first, _ = begin(part(tmp_path, "a/1"))
    second, _ = begin(part(tmp_path, "a/1"))
    assert (first["lost_steps"], second["lost_steps"], second["lost_documents"]) == (2, 0, 0)
    assert first["lost_seconds"] > 90 and second["lost_seconds"] < 30


def test_generations_are_numbered_on_after_a_damaged_line(tmp_path: Path) -> None:
    for _ in range(2):
        begin(part(tmp_path, "a/1"))
    lines = (tmp_path / GENERATIONS).read_text().splitlines()
    (tmp_path / GENERATIONS).write_text(f"{lines[0][:20]}\n{lines[1]}\n")
    assert begin(part(tmp_path, "a/1"))[0]["generation"] == 3


HOLDS = "import sys, time; from truestep.run.directory import *; d = RunDirectory(Path(sys.argv[1])); d.lock(); "


@pytest.mark.parametrize("ends", [True, False])
def test_a_generation_waits_for_the_lock_before_it_writes(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(part(tmp_path, "a/1"))
    note(tmp_path, "host-1", "a/1")
    what = "print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS + what, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline()
    own = part(tmp_path, "a/1")
    own.directory = RunDirectory(tmp_path, patience=30.0 if ends else 0.3)
    waits: list[str] = []
    made = progress.made

    def note_wait(kind: str, amount: float = 1) -> None:
        waits.append(kind)
        made(kind, amount)
        if ends:
            holder.kill()

    monkeypatch.setattr(progress, "made", note_wait)
    try:
        if ends:
            assert begin(own)[0]["generation"] == 2
        else:
            with pytest.raises(RankLostError, match="is being written by another process"):
                begin(own)
            assert len((tmp_path / GENERATIONS).read_text().splitlines()) == 1
            assert [path.name for path in tmp_path.glob(".generation*")] == [".generation-ended-host-1"]
        assert "waits for the lock" in waits, "the watch sees that it does not stall"
    finally:
        holder.kill()
        holder.communicate()


def test_a_rank_of_an_earlier_start_cannot_write_into_a_checkpoint(tmp_path: Path) -> None:
    stores = []
    for _ in range(2):
        stores.append(CheckpointStore(tmp_path, 1, mark=RunDirectory(tmp_path).token))
        stores[-1].prepare(3)
    old, new = (store.partial(3) for store in stores)
    assert old != new and new.is_dir() and not old.exists()


def test_the_agents_of_a_machine_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    class Four(Ranks):
        def gather(self, value: Any, ahead: bool = False, sampling: bool = False) -> list[Any]:
            return [value, "another machine", value, value]

    part(tmp_path, "a/1").count_beside(Four())
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"
    assert ranks_of_machine(Ranks(layout=RankLayout(data_shard=4))) == 3


def test_two_signals_at_once_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher and SLURM may both send it; the run saves."""
    own = part(tmp_path, "a/1")
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    own.asked_at = lambda: time.monotonic() - 1
    own._told_to_end(signal.SIGTERM, None)
    assert exits == []
    own.asked_at = lambda: time.monotonic() - 10
    own._told_to_end(signal.SIGTERM, None)
    assert exits == [128 + signal.SIGTERM]


def test_a_signal_ends_a_rank_that_waits_for_the_others_to_connect(tmp_path: Path) -> None:
    """Python's handlers wait for the end of such a call."""
    before = signal.getsignal(signal.SIGTERM)
    with part(tmp_path, "a/1").ending():
        assert signal.getsignal(signal.SIGTERM) == before


def test_the_sentence_of_a_generation(tmp_path: Path) -> None:
    from truestep.run.elastic import _sentence

    line: dict[str, Any] = {"generation": 4, "ranks": 2, "left": ["node7/31818"], "joined": [], "lost_steps": 1}
    line |= {"lost_documents": 8, "lost_seconds": 8.2}
    line["reason"] = "rank 2 is gone: its process has ended, and last it was computing step 16"
    page = Path(__file__).parent.parent / "docs" / "machines.md"
    assert _sentence(line, {"ranks": 3}) in page.read_text(encoding="utf-8")
    assert GENERATIONS in page.read_text(encoding="utf-8")
