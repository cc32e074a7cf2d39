"""Small real runs for tests: models with tokenizers, prompts, rollouts, configurations, and what a run wrote."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tiny import VOCABULARY, make_model, make_records
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.environments import sorting
from truestep.metrics.observers import Observer
from truestep.metrics.spent import of_the_machine
from truestep.ranks.forks import fork_context
from truestep.rollouts.kept.files import list_files, read_rows
from truestep.run.train import make_trainer, train
from truestep.run.trainer import Trainer
from truestep.step.before.annotators import Annotator
from truestep.tools.demo import model as demo_model
from truestep.types import StepPlan

WORDS = tuple(f"w{number}" for number in range(VOCABULARY - 2))  # with the end and the unknown: the whole vocabulary


def word_model(directory: Path) -> Path:
    """The demo's model: 14 tokens, digits among them."""
    return demo_model.make_model(directory, sorting.WORDS, seed=0)


def tokenised_model(directory: Path, kind: str, **options: Any) -> Path:
    """A model of tests/tiny.py with a word-level tokenizer of as many words as it has ids."""
    make_model(directory, kind, **options)
    assert demo_model.make_tokenizer(directory, WORDS) == VOCABULARY
    return directory


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_rollouts(path: Path, documents: int, **options: Any) -> list[dict[str, Any]]:
    records = make_records(5, documents=documents, max_length=16, **options)
    write_lines(path, records)
    return records


def sort_prompts(count: int) -> list[dict[str, str]]:
    stream = sorting.prompts(seed=1)
    return [{"id": f"prompt-{number}", **next(stream)} for number in range(count)]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for name, value in over.items():
        inner = both.get(name)
        both[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return both


def file_config(model: Path, rollouts: Path, run: Path, /, **sections: Any) -> Config:
    base = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(rollouts), "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 5},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"directory": str(run)},
        "logging": {"console": False},
    }
    return Config.model_validate(merged(base, sections))


def sampled_config(model: Path, prompts: Path, run: Path, /, **sections: Any) -> Config:
    base = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"group_size": 4, "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 8, "steps": 3},
        "sampler": {
            "prompts": str(prompts),
            "reward": "plain_rewards:digit_reward",
            "reward_workers": 1,  # each is a process; several: environments/test_rater.py
            "max_new_tokens": 6,
        },
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"directory": str(run)},
        "logging": {"console": False},
    }
    return Config.model_validate(merged(base, sections))


def said(config: Config) -> str:
    """Train, and give what the run writes to the console."""
    written = io.StringIO()
    shown = config.model_copy(update={"logging": config.logging.model_copy(update={"console": True})})
    train(shown, Console(file=written, width=200))
    return written.getvalue()


def quiet_trainer(config: Config) -> Trainer:
    return make_trainer(config, Console(file=io.StringIO()))


def tell(trainer: Trainer, **methods: Callable[..., None]) -> None:
    """Have functions called at the events of a run that have their names, such as `gradient`."""
    trainer.observers.add(type("Told", (Observer,), {name: staticmethod(call) for name, call in methods.items()})())


def change_plans(trainer: Trainer, change: Callable[[StepPlan], StepPlan]) -> None:
    """Have a function change each step's plan before anything else is known of it."""
    trainer.annotators.all.insert(0, type("Change", (Annotator,), {"annotate": staticmethod(change)})())


def type_command(arguments: Sequence[str], console: Path, **environment: str) -> BaseProcess:
    """Start `truestep` with these arguments in a process of its own, forked from one that has imported all of it."""
    process = fork_context().Process(target=_command, args=(list(arguments), str(console), environment))
    process.start()
    return process


def _command(arguments: list[str], console: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    written = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    torch.set_num_threads(1)
    main(arguments, prog_name="truestep")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kept_rows(run: Path) -> list[dict[str, Any]]:
    """Read the rollouts that a run kept."""
    return [row for file in list_files(run / "rollouts") for row in read_rows(file)]


def without_times(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not of_the_machine(name)} for line in lines]


def file_hashes(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
