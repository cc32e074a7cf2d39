"""Ten small real runs of the demo's model and task: nine that go wrong as runs do, and one that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from truestep.config.schema import Config
from truestep.files.whole import read_json_lines
from truestep.metrics.spent import of_the_machine
from truestep.run.train import train
from truestep.tools.demo import run as demo

RECORDED = Path(__file__).parent / "recorded"
ALL_RIGHT = "all right"
# The verdict that each of them must have.
VERDICTS = {
    "collapse": "collapse",
    "dead part": "dead part correct",
    "hacked": "hacked",
    "constant reward": "constant reward",
    "too easy": "too easy",
    "too hard": "too hard",
    "entropy": "entropy",
    "rate": "rate",
    "length": "length",
    ALL_RIGHT: "learned",
}
# What each run changes of the demo's second phase.
RUNS: dict[str, dict[str, Any]] = {
    "collapse": {"sampler.reward": "verdicts.planted_rewards:ones"},
    "dead part": {"sampler.reward": "verdicts.planted_rewards:with_dead_part"},
    "hacked": {
        "sampler.reward": "verdicts.planted_rewards:hacked",
        "evaluation.reward": "truestep.environments.sorting:reward",
    },
    "constant reward": {"sampler.reward": "verdicts.planted_rewards:constant", "schedule.steps": 8},
    "too easy": {
        "sampler.reward": "verdicts.planted_rewards:easy",
        "schedule.steps": 20,
        "optimizer.learning_rate": 1e-5,
    },
    "too hard": {"sampler.reward": "verdicts.planted_rewards:hard", "schedule.steps": 8},
    "entropy": {"loss.entropy_bonus": 0.5},
    "rate": {"optimizer.learning_rate": 0.1, "optimizer.schedule": "constant"},
    "length": {"sampler.reward": "verdicts.planted_rewards:long", "sampler.max_new_tokens": 24},
    ALL_RIGHT: {},
}
_SMALLER = {"data.group_size": 8, "schedule.docs_per_step": 128, "schedule.steps": 40, "checkpoint.every": 0}


def warm_model(directory: Path) -> tuple[Path, Path]:
    """Make the demo's task and its model after the warm-up; give the model's directory and the task's."""
    base = demo.make_model(directory / "model", demo.sorting.WORDS, 0)
    demo._write_task(directory, base, 0)
    policy = demo._train(demo.PHASES[0], base, directory, 0, Console(quiet=True)).checkpoints.latest()
    assert policy is not None
    return policy, directory


def config_of(name: str, model: Path, task: Path, run: Path) -> Config:
    whole = demo.phase_config(demo.PHASES[1], model, task, 0)
    return whole.changed(_SMALLER | RUNS[name] | {"checkpoint.directory": str(run)})


def make_run(name: str, model: Path, task: Path, run: Path, console: Console) -> Path:
    train(config_of(name, model, task, run), console)
    return run


def columns(run: Path) -> dict[str, Any]:
    """Give the numbers of a run by name, as `recorded` has them: to six digits, and without those of the machine."""
    found: dict[str, Any] = {}
    for name in ("metrics", "evaluation"):
        lines = read_json_lines(run / f"{name}.jsonl")
        numbers = [key for key, value in lines[0].items() if isinstance(value, int | float) and not of_the_machine(key)]
        names = [key for key in numbers if all(key in line for line in lines)]
        found[name] = {key: [float(f"{line[key]:.6g}") for line in lines] for key in names}
    return found


if __name__ == "__main__":  # with a directory: makes the runs there, and writes `recorded` anew
    place = Path(sys.argv[1])
    torch.set_num_threads(1)
    made = warm_model(place)
    for number, run_name in enumerate(RUNS):
        with (place / f"{number}.txt").open("w", encoding="utf-8") as transcript:
            make_run(run_name, *made, place / str(number), Console(file=transcript, width=80))
        text = json.dumps(columns(place / str(number)), separators=(",", ":"))
        (RECORDED / f"{run_name.replace(' ', '-')}.json").write_text(text + "\n", encoding="utf-8")
