"""Ten small real runs of the demo's model and task: nine that go wrong as runs do, and one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from truestep.config.schema import Config
from truestep.demo import run as demo
from truestep.train import train

ALL_RIGHT = "all right"
# What each run changes of the demo's second phase.
RUNS: dict[str, dict[str, Any]] = {
    "collapse": {"sampler.reward": "planted_rewards:ones"},
    "dead part": {"sampler.reward": "planted_rewards:with_dead_part"},
    "hacked": {
        "sampler.reward": "planted_rewards:hacked",
        "evaluation.reward": "truestep.environments.sorting:reward",
    },
    "constant reward": {"sampler.reward": "planted_rewards:constant", "schedule.steps": 8},
    "too easy": {
        "sampler.reward": "planted_rewards:easy",
        "schedule.steps": 20,
        "optimizer.learning_rate": 1e-5,
    },
    "too hard": {"sampler.reward": "planted_rewards:hard", "schedule.steps": 8},
    "entropy": {"loss.entropy_bonus": 0.5},
    "rate": {"optimizer.learning_rate": 0.1, "optimizer.schedule": "constant"},
    "length": {"sampler.reward": "planted_rewards:long", "sampler.max_new_tokens": 24},
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
