"""Faults of every part of an update, at the rates that people use: `verify` finds each and says what it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from selection import in_tiers
from small_runs import file_config, merged, write_rollouts
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.tools.verify import judge
from truestep.tools.verify.judge import Judge, make_judge
from truestep.tools.verify.layouts import layouts_for
from truestep.tools.verify.report import complaints
from verify.update_faults import FAULTS

EXAMPLES = Path(__file__).parents[2] / "examples"
RATES = (1e-6, 1e-5, 1e-3)


def options(model: Path, folder: Path, rate: float, over: dict[str, Any]) -> Config:
    write_rollouts(folder / "rollouts.jsonl", 12, advantages="rewards", group_size=4)
    base = {
        "data": {"advantages": "group_normalized", "group_size": 4},
        "optimizer": {
            "learning_rate": rate,
            "schedule": "linear",
            "warmup_steps": 4,
            "minimum_learning_rate": rate / 10,
            "weight_decay": 0.1,
        },
        "schedule": {"steps": 40},
    }
    sections = {name: value for name, value in over.items() if name != "freeze"}
    config = file_config(model, folder / "rollouts.jsonl", folder / "run", **merged(base, sections))
    return config.changed({"model.freeze": over.get("freeze")})


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


@pytest.fixture(scope="module")
def judge_of(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Judge]:
    """Faults of one configuration share its case, and the reference's steps."""
    made: dict[str, Judge] = {}

    def judge_of(rate: float, over: dict[str, Any]) -> Judge:
        key = f"{rate} {over}"
        if key not in made:
            folder = tmp_path_factory.mktemp("case")
            made[key] = make_judge(options(tiny_model("qwen3"), folder, rate, over), folder, documents=10, full=False)
        return made[key]

    return judge_of


def said_of(judged: Judge, layout: str, plant: Callable[[], None] | None) -> list[str]:
    judged.plant = plant
    (chosen,) = [
        known for known in layouts_for(judged.case.budget, judged.case.longest, 2, False) if known.name == layout
    ]
    (verdict,) = judged.judge([chosen])
    assert verdict.failure is None, verdict.failure
    return complaints(verdict)


CASES = [(fault.name, rate) for fault in FAULTS for rate in RATES]
IN_SHORT = [("no weight decay", 1e-6), ("no clipping", 1e-6), ("advantages doubled", 1e-6)]
IN_LONG = [(name, 1e-6) for name in ("rate 10% low", "betas swapped", "norms decayed", "epsilon in the root")]


@pytest.mark.parametrize(("name", "rate"), in_tiers(CASES, IN_SHORT, IN_LONG))
def test_a_fault_is_found_and_named(name: str, rate: float, judge_of: Callable[..., Judge]) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    said = said_of(judge_of(rate, fault.over), fault.layout, fault.plant)
    assert any(line.startswith(f"{fault.kind} ") and fault.words in line for line in said), said


OVERS = {str(fault.over): fault.over for fault in FAULTS}


@pytest.mark.parametrize(("over", "rate"), in_tiers([(o, r) for o in OVERS for r in RATES], [("{}", 1e-6)], []))
def test_without_a_fault_nothing_is_found(over: str, rate: float, judge_of: Callable[..., Judge]) -> None:
    for layout in ("one process", "FSDP 2"):
        assert not said_of(judge_of(rate, OVERS[over]), layout, None)


BY_COMMAND = ["no clipping", "no weight decay", "norms decayed", "advantages of the wrong sign"]


@pytest.mark.parametrize("name", in_tiers(BY_COMMAND, [], ["norms decayed", "advantages of the wrong sign"]))
def test_the_command_names_it_at_the_examples_own_rate(
    name: str, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    only = [fault.layout]
    planted = partial(judge.verify, plant=fault.plant, only=lambda layout: layout.name in only)
    monkeypatch.setattr(judge, "verify", planted)
    arguments = [
        "verify",
        str(examples / "grpo.yaml"),
        "--optimizer.weight_decay",
        "0.1",
        "--output",
        str(tmp_path / "o"),
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1, done.output
    assert any(
        line.startswith(f"one process: {fault.kind} ") and fault.words in line for line in done.stdout.splitlines()
    )
    said = json.loads((tmp_path / "o" / "verify.json").read_text(encoding="utf-8"))
    assert not said["passed"] and said["layouts"][0]["worst"][fault.kind]["name"]
