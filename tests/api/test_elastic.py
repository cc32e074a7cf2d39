"""What a Python program sees of a run whose ranks come and go, as docs/python.md says it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agents import Agents
from test_elastic import STEPS, compare, make_config, nothing_left, undisturbed


def told(folder: Path) -> dict[int, list[str]]:
    """What each process has written down, by its id."""
    found: dict[int, list[str]] = {}
    for line in (folder / "told").read_text(encoding="utf-8").splitlines():
        process, _, what = line.partition(" ")
        found.setdefault(int(process), []).append(what)
    return found


@pytest.mark.long
def test_train_exits_with_143_where_ranks_leave_or_join_and_is_called_again(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, model = tmp_path / "elastic", tiny_model("llama")
    folder.mkdir()
    program = "elastic_program:program"
    with Agents(folder, make_config(folder, model), folder / "run", program=program) as agents:
        agents.start(0, 1, 2)
        agents.until(lambda: agents.steps >= 4)
        agents.agents[1].terminate()
        agents.until(lambda: len(agents.generations) == 2 and agents.steps >= 10)
        assert set(map(tuple, told(folder).values())) == {("exit 143", "finally")}, "also where its own agent goes on"
        ended = len(told(folder))
        agents.signal(2, signal.SIGKILL)
        assert agents.wait(0, 2) == [0, 0], agents.log()[-6000:]
        nothing_left(agents)
    assert ended == 3
    later = list(told(folder).values())[ended:]
    # Behind a loss processes end at once, or `train` raises; the next generation calls it again.
    assert later[-2:] == [[f"finished {STEPS}", "finally"]] * 2
    assert all(each == ["error RankLostError", "finally"] for each in later[:-2])
    compare(agents.run, undisturbed(tmp_path / "whole", model, 3))
