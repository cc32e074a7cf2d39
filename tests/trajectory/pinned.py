"""What a short run of the demo's task does, step by step, as numbers that are kept: a change of any number of a step
(advantages, denominators, the learning rate, the draw of a token) moves them.

    make trajectory    writes the numbers anew, where a change is meant: look at their difference before you commit it

A run goes through `train`, as a user's does. From random weights it samples eight answers to each of four prompts, is
paid for each digit that stands in its place, and makes two updates on each batch.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from small_runs import read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.config.schema import Config
from truestep.run.train import train

FILE = Path(__file__).with_name("pinned.json")
SEEDS = (0, 1, 2)
STEPS = 8
NAMES = ("reward", "response_length", "loss", "grad_norm", "new_logprobs", "entropy", "kl_new_old", "learning_rate")
# What follows from tokens alone is equal. Other numbers carry rounding: a change of all weights by 2e-7 of themselves
# moves no number by 3e-4, and a learning rate that is 1% off moves every one by more than 1e-2. The optimizer's epsilon
# is large so that a gradient of nearly 0 does not turn its rounding into a step of full size.
TOLERANCE = 1e-3
_LEAST = {"loss": 1e-1, "grad_norm": 1e-1, "kl_new_old": 1e-2}  # a smaller number is compared as one of this size
_OF_TOKENS = ("reward", "response_length", "learning_rate")
_EXACT = 1e-9

Line = Mapping[str, float]


def options(directory: Path, seed: int) -> Config:
    prompts = write_lines(directory / "prompts.jsonl", sort_prompts(64))
    return sampled_config(
        word_model(directory / "model"),
        prompts,
        directory / "run",
        seed=seed,
        loss={"type": "grpo", "normalize_by": "labels", "entropy_bonus": 0.01},
        data={"group_size": 8, "tokens_per_microbatch": 128, "advantages": "group_normalized"},
        schedule={"docs_per_step": 32, "steps": STEPS, "updates_per_batch": 2},
        sampler={"reward": "plain_rewards:digits_in_place", "max_new_tokens": 5, "temperature": 0.9},
        optimizer={
            "learning_rate": 2e-2,
            "epsilon": 1e-3,
            "gradient_clip": 0.5,
            "warmup_steps": 2,
            "schedule": "linear",
            "weight_decay": 0.1,
        },
        checkpoint={"every": 0},
    )


def run(seed: int) -> list[dict[str, float]]:
    """Train for some steps, and give the numbers of each."""
    with tempfile.TemporaryDirectory(prefix="trajectory-") as scratch:
        config = options(Path(scratch), seed)
        train(config, Console(file=io.StringIO()))
        lines = read_lines(Path(scratch) / "run" / "metrics.jsonl")
    return [{name: line[name] for name in NAMES} for line in lines]


def read() -> dict[str, list[dict[str, float]]]:
    kept: dict[str, list[dict[str, float]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return kept


def differences(found: Sequence[Line], kept: Sequence[Line]) -> Iterator[str]:
    """Name each number that is not the one that is kept."""
    if len(found) != len(kept):
        yield f"{len(found)} steps, not {len(kept)}"
    for step, (now, before) in enumerate(zip(found, kept, strict=False), start=1):
        for name in NAMES:
            off = abs(now[name] - before[name]) / max(abs(before[name]), _LEAST.get(name, 1e-12))
            if not off <= (_EXACT if name in _OF_TOKENS else TOLERANCE):
                yield f"step {step}: {name} is {now[name]:.7g}, not {before[name]:.7g} (off by {off:.1e})"


def write() -> None:
    torch.set_num_threads(1)
    numbers: dict[str, Any] = {str(seed): run(seed) for seed in SEEDS}
    lines = [
        f'"{seed}": [\n' + ",\n".join(f"  {json.dumps(line)}" for line in numbers[seed]) + "\n]" for seed in numbers
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
