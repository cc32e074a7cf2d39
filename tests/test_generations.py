"""What is written of a generation: who left, why, what was lost; and which agents are ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from small_runs import write_lines
from truestep.errors import TruestepError
from truestep.ranks.elastic import Agent, RankLostError
from truestep.ranks.group import ALONE
from truestep.ranks.watch import Watch
from truestep.run.checkpoint.checksums import MANIFEST
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


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    (folder / FOLDER).mkdir(parents=True)
    for file in (folder / FOLDER / "state.json", folder / MANIFEST):
        file.write_text("{}")


def steps(run: Path, last: int, ago: float) -> None:
    """A run that has made steps of 8 documents, each in 2 seconds, the last one so many seconds ago."""
    numbers = range(1, last + 1)
    write_lines(run / "ledger.jsonl", [{"step": n, "documents": ["a"], "documents_seen": 8 * n} for n in numbers])
    write_lines(run / "metrics.jsonl", [{"step": n, "step_time": 2.0} for n in numbers])
    os.utime(run / "ledger.jsonl", (time.time() - ago,) * 2)


def test_the_first_generation(tmp_path: Path) -> None:
    line, before = part(tmp_path / "run", "a/1", "b/2")._begin()
    assert before is None and (line["generation"], line["step"], line["agents"]) == (1, 0, ["a/1", "b/2"])
    assert line["left"] == line["joined"] == [] and "lost_seconds" not in line


def test_a_generation_after_a_loss(tmp_path: Path) -> None:
    part(tmp_path, "a/1", "b/2", "c/3")._begin()
    checkpoint(tmp_path, 5)
    steps(tmp_path, 7, ago=100)
    survivor = part(tmp_path, "a/1", "b/2", "c/3")
    survivor.watch = Watch(ALONE, 60)
    survivor.watch.lost = [1]
    survivor.note("rank 1 is gone", own=False)
    survivor.note("rank 0 is gone", own=False)  # the first reason stays
    line, before = part(tmp_path, "a/1", "c/3", "d/4")._begin()
    assert before is not None and line["generation"] == 2
    assert (line["left"], line["joined"], line["failed"]) == (["b/2"], ["d/4"], ["b/2"])
    assert (line["step"], line["lost_steps"], line["lost_documents"]) == (5, 2, 16)
    assert line["lost_seconds"] == pytest.approx(104, abs=30)
    assert line["reason"] == "rank 1 is gone"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_was_started_anew_has_lost_no_time(tmp_path: Path) -> None:
    part(tmp_path, "a/1")._begin()
    checkpoint(tmp_path, 5)
    steps(tmp_path, 7, ago=1e6)
    line, _ = part(tmp_path, "a/9")._begin()
    assert "lost_seconds" not in line and line["left"] == ["a/1"]


@pytest.mark.parametrize("saved", [False, True])
def test_an_agent_that_fails_twice_is_left_out_unless_the_run_got_further(saved: bool, tmp_path: Path) -> None:
    for failure in range(2):
        line, _ = part(tmp_path, "a/1", "b/2")._begin()
        assert line["unfit"] == []
        (tmp_path / ".generation-ended").write_text('{"reason": "it failed", "failed": ["b/2"]}')
        if saved and failure:
            checkpoint(tmp_path, 3)
    line, _ = part(tmp_path, "a/1", "b/2")._begin()
    assert line["unfit"] == ([] if saved else ["b/2"])


@pytest.mark.parametrize(
    ("error", "failed", "over"),
    [
        (TruestepError("the data has no documents"), True, True),
        (RankLostError("rank 1 is gone"), False, False),
        (ZeroDivisionError("planted"), True, False),
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
    line, _ = part(tmp_path, "a/1")._begin()
    assert line["failed"] == ([own.agent.name] if failed else [])
    assert ended == [1] * over, "an error that would come again ends the agent too"


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


def test_the_sentence_of_a_generation(tmp_path: Path) -> None:
    from truestep.run.elastic import _sentence

    line: dict[str, Any] = {"generation": 4, "ranks": 2, "left": ["node7/31818"], "joined": [], "lost_steps": 1}
    line |= {"lost_documents": 8, "lost_seconds": 8.2}
    line["reason"] = "rank 2 is gone: its process has ended, and last it was computing step 16"
    page = Path(__file__).parent.parent / "docs" / "machines.md"
    assert _sentence(line, {"ranks": 3}) in page.read_text(encoding="utf-8")
    assert GENERATIONS in page.read_text(encoding="utf-8")
