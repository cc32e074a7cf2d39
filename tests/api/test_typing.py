"""`mypy --strict` holds for programs that use the public names, and none of these is Any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import truestep

PROGRAM = """
from collections.abc import Mapping
from pathlib import Path
from typing import Any
import truestep
from truestep import Callback, Config, Rollout, Run, TrainingResult, load_config, train

class Own(Callback):
    def on_step(self, run: Run, metrics: Mapping[str, Any]) -> None:
        run.stop(f"step {run.step}")

config: Config = Config(model={"path": Path("m")}, loss={"type": "gspo"}).changed({"seed": 1})
result: TrainingResult = train(load_config("a.yaml", ["--seed", "1"]), callbacks=[Own()])
step: int = result.step
rollouts: list[Rollout] = []
"""
WRONG = "Config(modl={})\ntrain(3)\nresult.stepp\nclass Bad(Callback):\n    def on_step(self, run: str) -> None: ...\n"


@pytest.mark.release
def test_a_program_is_checked_strictly(tmp_path: Path) -> None:
    names = "".join(f"reveal_type(truestep.{name})\n" for name in truestep.__all__)
    (tmp_path / "good.py").write_text(PROGRAM + names, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(PROGRAM + WRONG, encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--no-error-summary",
            "good.py",
            "wrong.py",
        ],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(Path(truestep.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("good.py") and "note: Revealed" not in line], done.stdout
    revealed = [line for line in lines if "note: Revealed" in line]
    assert len(revealed) == len(truestep.__all__)
    assert not [line for line in revealed if '"Any"' in line or '"def (*Any' in line], done.stdout
    wrong = {int(re.findall(r":(\d+):", line)[0]) for line in lines if line.startswith("wrong.py") and "error" in line}
    first = PROGRAM.count("\n") + 1
    assert wrong == {first, first + 1, first + 2, first + 4}, done.stdout
