"""The state in memory: a run that loses ranks goes on from it, and from the disk only if both copies went."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents import Agents
from small_runs import sampled_config, sort_prompts, word_model, write_lines
from test_elastic import STEPS, compare, disturb, make_config, nothing_left, undisturbed
from truestep.config.load import dump_config
from truestep.ranks import keeper
from truestep.ranks.keeper_client import KeeperError, LocalKeeper

EVERY = 2  # steps between copies in memory
RARE = 1000  # steps between checkpoints on the disk


def agents_of(folder: Path, model: Path, every: int = RARE, **more: Any) -> Agents:
    folder.mkdir(exist_ok=True)
    kept = {"directory": str(folder / "run"), "every": every, "in_memory_every": EVERY}
    return Agents(folder, make_config(folder, model, checkpoint=kept), folder / "run", **more)


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "whole", tiny_model("llama"), 3)


def keeper_of(name: str) -> int:
    """The process of a keeper; 0 if there is none."""
    try:
        with LocalKeeper(name).connected() as connection:
            return keeper.user_of(connection.socket)[0]
    except KeeperError:
        return 0


def keepers(agents: Agents) -> list[int]:
    """The keepers of a run, on this machine and on those that tests make of it."""
    places = [f"machine {number}" for number in agents.agents]
    of_machines = [hashlib.sha256(f"{place} {agents.run.resolve()}".encode()).hexdigest()[:24] for place in places]
    names = [f"truestep-keeper-{os.geteuid()}-{told}-0" for told in of_machines]
    names += [LocalKeeper.of(agents.run, number).name for number in (0, 1)]
    return [process for name in names if (process := keeper_of(name))]


def nothing_is_left(agents: Agents, seen: list[int]) -> None:
    nothing_left(agents)
    agents.until(lambda: not any(keeper.started(process) for process in seen))
    assert keepers(agents) == []


@pytest.mark.long
def test_a_rank_that_is_killed_goes_on_from_memory(
    tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), nodes=(2, 3), waits_for_all=True) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 7)
        seen = keepers(agents)
        assert len(seen) == 2
        agents.signal(1, signal.SIGKILL)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        second = agents.generations[1]
        assert second["from"] == "memory" and second["step"] >= 6 and second["lost_steps"] <= EVERY
        said = f"it goes on after step {second['step']} from memory"
        assert said in agents.log() and f"going on after step {second['step']} of the state in memory" in agents.log()
        nothing_is_left(agents, seen)
    compare(agents.run, whole, bitwise=True)


@pytest.mark.long
def test_a_machine_that_is_lost_comes_from_its_partner(
    tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), nodes=(2, 3), own_machines=True) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 7)
        seen = keepers(agents)
        assert len(seen) == 3
        agents.agents[1].kill()
        agents.signal(1, signal.SIGKILL)  # its keeper ends when it finds neither
        assert agents.wait(0, 2) == [0, 0], agents.log()[-6000:]
        second = agents.generations[1]
        assert (second["from"], second["ranks"]) == ("memory", 2) and second["lost_steps"] <= EVERY
        nothing_is_left(agents, seen)
    compare(agents.run, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [1, 2])
def test_the_disk_is_for_the_loss_of_both_copies(
    lost: int, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), every=3, nodes=(2, 3), waits_for_all=True) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 8)
        seen = keepers(agents)
        agents.signal(2, signal.SIGSTOP)  # no step is made meanwhile, which would start a keeper again
        for process in seen[:lost]:
            os.kill(process, signal.SIGKILL)
        agents.signal(2, signal.SIGKILL)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        second = agents.generations[1]
        assert second["from"] == ("memory" if lost == 1 else "disk")
        nothing_is_left(agents, seen)
    compare(agents.run, whole, bitwise=True)


@pytest.mark.nightly
def test_when_all_are_killed_the_keepers_end_too(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), nodes=(2, 3)) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 5)
        seen = keepers(agents)
        for number, agent in agents.agents.items():
            agent.kill()
            agents.signal(number, signal.SIGKILL)
        agents.until(lambda: not any(keeper.started(process) for process in seen))
        assert seen and keepers(agents) == []


@pytest.mark.release
@pytest.mark.parametrize("own_machines", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_seeded_losses_and_joins(
    seed: int, own_machines: bool, tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), every=7, own_machines=own_machines) as agents:
        disturb(agents, seed)
        agents.until(lambda: "the data ended after step" in agents.log())
        agents.end()
        nothing_is_left(agents, [])
        steps = [line["step"] for line in agents.lines("metrics.jsonl")]
        assert steps == list(range(1, STEPS + 1))
        # On machines of their own both copies of a part may be lost at once.
        used = [line for line in agents.generations if line.get("from") == "memory" or not own_machines]
        assert all(line.get("lost_steps", 0) <= EVERY for line in used)
    compare(agents.run, whole)


@pytest.mark.nightly
def test_documents_that_are_drawn_in_process_are_each_in_the_ledger_once(tmp_path: Path) -> None:
    model, prompts = word_model(tmp_path / "model"), write_lines(tmp_path / "prompts.jsonl", sort_prompts(60))
    kept = {"checkpoint": {"every": RARE, "in_memory_every": EVERY}, "schedule": {"steps": 12, "stall_timeout": 20}}
    given = sampled_config(model, prompts, tmp_path / "run", deterministic=True, **kept)
    (tmp_path / "config.yaml").write_text(dump_config(given), encoding="utf-8")
    with Agents(tmp_path, tmp_path / "config.yaml", tmp_path / "run", nodes=(1, 2), waits_for_all=True) as agents:
        agents.start(0, 1)
        agents.until(lambda: agents.steps >= 6)
        seen = keepers(agents)
        agents.signal(1, signal.SIGKILL)
        assert agents.wait(0, 1) == [0, 0], agents.log()[-6000:]
        second = agents.generations[1]
        assert second["from"] == "memory" and second["lost_steps"] <= EVERY
        nothing_is_left(agents, seen)
        lines = agents.lines("ledger.jsonl")
        assert [line["step"] for line in lines] == list(range(1, 13))
        names = [name for line in lines for name in line["documents"]]
        assert len(names) == len(set(names)) == 12 * 8
