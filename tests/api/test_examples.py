"""examples/python: the programs run as they are, and the notebook's cells one after another."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from selection import nightly_except
from truestep import init
from truestep.ranks.forks import fork_context

FOLDER = Path(__file__).parents[2] / "examples" / "python"
LOOPS = ("own_loop", "own_gspo", "own_sft", "own_dpo", "own_distillation", "own_ppo")
PROGRAMS = ("with_callbacks", "own_objective", "own_source", "sweep", "look_inside", *LOOPS)
LAST_LINES = {
    "with_callbacks": "all 2 steps are done; learning rate 0.002",
    "own_objective": "all 2 steps are done; surprise ",
    "own_source": "the data ended after step 2",
    "sweep": "compared in ",
    "own_loop": "saved: made/own-loop/step-00000002",
    "own_gspo": "saved: made/own-gspo/step-00000002",
    "own_sft": "loss ",
    "own_dpo": "saved: made/own-dpo/step-00000002",
    "own_distillation": "saved: made/own-distillation/step-00000002",
    "own_ppo": "saved: made/own-ppo/step-00000002",
    "look_inside": "the data ended after step 2; a Hugging Face directory: ",
}


def in_a_process(target: Any, *arguments: Any, folder: Path) -> list[str]:
    """Run in a process that has imported everything, and give the lines that it printed."""
    said = folder / "said.txt"
    process = fork_context().Process(target=_begin, args=(target, str(folder), str(said), *arguments))
    process.start()
    process.join(300)
    lines = said.read_text(encoding="utf-8").splitlines()
    assert process.exitcode == 0, lines
    return lines


def _begin(target: Any, folder: str, said: str, *arguments: Any) -> None:
    written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    target(*arguments)
    sys.stdout.flush()


def run_program(name: str, prompts: int | None = None) -> None:
    """Run two steps, with no more than so many prompts."""
    if prompts is not None:
        init(Path("made/task"), None)
        file = Path("made/task/prompts.jsonl")
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:prompts]))
    sys.argv = [name, "--directory", "made", "--steps", "2"]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", nightly_except(PROGRAMS, "own_source"))
def test_a_program_runs_as_it_is(name: str, tmp_path: Path) -> None:
    lines = in_a_process(run_program, name, folder=tmp_path)
    assert any(line.startswith(LAST_LINES[name]) for line in lines), lines


@pytest.mark.parametrize("name", nightly_except([name for name in LOOPS if name != "own_gspo"], "own_dpo"))
def test_steps_may_be_more_than_there_are_prompts(name: str, tmp_path: Path) -> None:
    lines = in_a_process(run_program, name, 5, folder=tmp_path)
    assert any(line.startswith(LAST_LINES[name]) for line in lines), lines


def test_no_program_is_forgotten() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PROGRAMS, "task"}


def test_the_notebook_holds_no_output() -> None:
    notebook = json.loads((FOLDER / "tour.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)
