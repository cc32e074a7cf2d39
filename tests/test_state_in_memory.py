"""The state in memory: a run that loses ranks goes on from it, and from the disk only if both copies went."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agents import Agents
from test_elastic import compare, make_config, nothing_left, undisturbed

EVERY = 2  # steps between copies in memory


def agents_of(folder: Path, model: Path, **more: object) -> Agents:
    folder.mkdir(exist_ok=True)
    kept = {"directory": str(folder / "run"), "every": 1000, "in_memory_every": EVERY}
    return Agents(folder, make_config(folder, model, checkpoint=kept), folder / "run", **more)


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "whole", tiny_model("llama"), 3)


@pytest.mark.long
def test_a_rank_that_is_killed_goes_on_from_memory(
    tiny_model: Callable[[str], Path], tmp_path: Path, whole: Path
) -> None:
    with agents_of(tmp_path / "elastic", tiny_model("llama"), nodes=(2, 3), waits_for_all=True) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 7)
        agents.signal(1, signal.SIGKILL)
        assert agents.wait(0, 1, 2) == [0, 0, 0], agents.log()[-6000:]
        second = agents.generations[1]
        assert second["from"] == "memory" and second["step"] >= 6 and second["lost_steps"] <= EVERY
        assert "it goes on after step" in agents.log() and "from memory" in agents.log()
        nothing_left(agents)
    compare(agents.run, whole, bitwise=True)
