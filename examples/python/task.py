"""What the programs beside this file share: a small task, made once, and its configuration in Python.

The task is to add two numbers. Without --model a tiny model is made that knows nothing, so that each program runs
anywhere in seconds.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from truestep import Config, Session, init


def reward(prompt: object, completion: str, *, answer: int, **_: object) -> float:
    """Give 1 for the right sum, 0.2 for any other number, and 0 for anything else."""
    written = re.sub(r"(?<=\d)\s+(?=\d)", "", completion.strip().rstrip("."))
    if not re.fullmatch(r"[0-9]+", written):
        return 0.0
    return 1.0 if written.lstrip("0") == str(answer) else 0.2


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--directory", type=Path, default=Path("runs/python"), help="where everything is written")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory; without it a tiny model is made")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def tasks(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Read the prompts, each with its answer."""
    lines = (given.directory / "task" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def written(session: Session, task: dict[str, Any], answer: int, **fields: Any) -> dict[str, Any]:
    """Make a record of a prompt and an answer that somebody wrote."""
    prompt, ids = (session.tokenizer(text)["input_ids"] for text in (task["prompt"], " ".join(str(answer))))
    return {"input_ids": [*prompt, *ids], "prompt_length": len(prompt), **fields}


def make_config(given: argparse.Namespace, run: str, **sections: dict[str, Any]) -> Config:
    """Make the configuration of one run in the directory; `sections` are put over it."""
    task = given.directory / "task"
    if not task.exists():
        init(task, given.model)
    base: dict[str, Any] = {
        "model": {"path": given.model or task / "model", "dtype": "float32" if given.model is None else "bfloat16"},
        "data": {"group_size": 8, "tokens_per_microbatch": 4096},
        "sampler": {"prompts": task / "prompts.jsonl", "reward": reward, "max_new_tokens": 6},
        "evaluation": {"prompts": task / "held_out.jsonl", "every": 10, "max_prompts": 16},
        "schedule": {"docs_per_step": 32, "steps": given.steps},
        "optimizer": {"learning_rate": 2e-3 if given.model is None else 5e-6},
        "checkpoint": {"directory": given.directory / run, "every": 10},
    }
    options: dict[str, Any] = {name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}}
    return Config(**options)
