"""Which objectives survive a sampler that is not the policy: staleness, noise and corrections on small tasks.

    python benchmarks/objectives.py --out study.jsonl [--jobs 16] [--seconds 420] [--seeds 0 1 2] [--tasks four six]
    python benchmarks/objectives.py --table study.jsonl [--figure study.svg]

The tasks are the demo's (put four digits in order) and a harder one (six digits). Each run begins with the same base
model for its task and seed, and samples its documents from weights that are `staleness` steps old, changed by the
noise of a sampler: bfloat16 (it computes in it), int8 (its weights have 8 bits, a scale for each row) or top_p (it
draws from 90% of the probability, and reports the log-probs of all of it). One line of JSON for each run; runs that
the file has are not made again. Each run has one process, on one CPU core, for about ten seconds; it uses no GPU.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from truestep.config.load import load_config
from truestep.environments import sorting
from truestep.files.whole import read_json_lines, write_json_lines
from truestep.generate.in_process import InProcessSource
from truestep.metrics.observers import Observer
from truestep.model.policy import Policy
from truestep.rollouts.source import Taken
from truestep.run.assemble.policy import make_policy
from truestep.run.train import make_trainer, train
from truestep.tools.demo.model import make_model

TIS = {"type": "truncate", "high": 2.0}
ICEPOP = {"type": "mask", "low": 0.5, "high": 2.0}
MIS = {"type": "mask", "level": "document", "low": 0.5, "high": 2.0}
GEOMETRIC = {"type": "reject", "level": "document_mean", "low": 0.9, "high": 1.1}

# What an objective adds to the loss section.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo"},
    "grpo, recomputed": {"type": "grpo", "old_logprobs": "recompute"},
    "grpo, recomputed, TIS": {"type": "grpo", "old_logprobs": "recompute", "correction": TIS},
    "grpo, recomputed, IcePop": {"type": "grpo", "old_logprobs": "recompute", "correction": ICEPOP},
    "grpo, recomputed, MIS": {"type": "grpo", "old_logprobs": "recompute", "correction": MIS},
    "grpo, geometric rejection": {"type": "grpo", "correction": GEOMETRIC},
    "grpo, off-policy mask": {"type": "grpo", "off_policy_mask": 0.1},
    "gspo": {"type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    "gmpo": {"type": "gmpo"},
    "cispo": {"type": "cispo", "epsilon_low": 1.0, "epsilon_high": 1.0},
    "sapo": {"type": "sapo"},
    "reinforce": {"type": "reinforce"},
    "dppo": {"type": "dppo"},
}
STALENESS = (0, 1, 4, 16)
NOISES = ("none", "bfloat16", "int8", "top_p")
NOISY_STALENESS = (0, 4)
# Digits to sort, and how often the corpus of the base model answers rightly.
TASKS = {"four": (4, 0.35), "six": (6, 0.2)}
HELD_OUT, PROMPTS, DOCUMENTS, STEPS = 200, 2048, 128, 100


def make_base(folder: Path, task: str, seed: int) -> Path:
    """Make the base model of a task, which has learned from a corpus of mixed quality, and its prompts."""
    digits, right = TASKS[task]
    base = folder / f"{task}-{seed}"
    if (base / "done").is_file():
        return base
    base.mkdir(parents=True, exist_ok=True)
    make_model(base / "model", sorting.WORDS, seed)
    stream = sorting.prompts(seed, digits)
    write_json_lines(base / "held_out.jsonl", itertools.islice(stream, HELD_OUT))
    prompts = list(itertools.islice(stream, PROMPTS))
    write_json_lines(base / "prompts.jsonl", prompts)
    write_json_lines(base / "corpus.jsonl", make_corpus(prompts, base / "model", right, seed))
    config = {
        "model": {"path": str(base / "model"), "dtype": "float32"},
        "loss": {"type": "cross_entropy"},
        "data": {"path": str(base / "corpus.jsonl"), "tokens_per_microbatch": 4096},
        "schedule": {"docs_per_step": 128, "steps": 240},
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20, "schedule": "linear"},
        "checkpoint": {"directory": str(base / "warm-up")},
        "seed": seed,
    }
    train(write_config(base / "warm-up.yaml", config), Console(file=io.StringIO()))
    (base / "done").touch()
    return base


def make_corpus(prompts: Sequence[dict[str, str]], model: Path, right: float, seed: int) -> Iterator[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    generator = random.Random(seed)
    for number in range(240 * 128):
        prompt = generator.choice(prompts)
        digits, draw = prompt["prompt"].split()[1:-1], generator.random()
        wrong = digits if draw < (1 + right) / 2 else sorted(digits, reverse=True)
        answer = prompt["answer"].split() if draw < right else wrong
        ids = tokenizer(prompt["prompt"])["input_ids"]
        ends = [*tokenizer(" ".join(answer))["input_ids"], tokenizer.eos_token_id]
        yield {"id": str(number), "input_ids": [*ids, *ends], "prompt_length": len(ids)}


def write_config(file: Path, config: dict[str, Any], *overrides: str) -> Any:
    file.write_text(yaml.safe_dump(config))
    return load_config(file, list(overrides))


def to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Round each row of a matrix to 255 values; a vector stays."""
    if weight.dim() < 2:
        return weight
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / scale).round() * scale


class OldWeights(Observer):
    """Lets a source sample from weights of some steps ago, as a sampler with this noise has them."""

    def __init__(self, source: InProcessSource, trained: Policy, sampling: Policy, staleness: int, noise: str):
        self._trained, self._sampling, self._noise = trained, sampling, noise
        self._lag, self._history = staleness * DOCUMENTS, deque[dict[str, torch.Tensor]](maxlen=staleness + 1)
        self._take = source.take
        source.generator.policy = sampling
        source.take = self.take  # type: ignore[method-assign]
        self.publish()

    def take(self, count: int, documents_seen: int) -> Taken:
        return self._take(count, max(documents_seen - self._lag, 0))

    def updated(self, step: int, documents_seen: int) -> None:
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        self._history.append({name: weight.detach().clone() for name, weight in self._trained.weights.master.items()})
        change: Callable[[torch.Tensor], torch.Tensor] = to_int8 if self._noise == "int8" else lambda weight: weight
        for name, parameter in self._sampling.model.named_parameters():
            parameter.copy_(change(self._history[0][name]))


def run(folder: Path, task: str, objective: str, staleness: int, noise: str, seed: int) -> dict[str, Any]:
    base = make_base(folder, task, seed)
    checkpoint = sorted((base / "warm-up" / "checkpoints").iterdir())[-1]
    digits, _ = TASKS[task]
    with tempfile.TemporaryDirectory() as place:
        config = {
            "model": {"path": str(checkpoint), "dtype": "float32", "head": {"fp32_lm_head": True}},
            "loss": {"metrics": "basic", **OBJECTIVES[objective]},
            "data": {"group_size": 8, "tokens_per_microbatch": 8192},
            "sampler": {
                "prompts": str(base / "prompts.jsonl"),
                "reward": "truestep.environments.sorting:reward",
                "reward_workers": 1,
                "max_new_tokens": digits + 4,
                "top_p": 0.9 if noise == "top_p" else 1.0,
            },
            "evaluation": {"prompts": str(base / "held_out.jsonl"), "every": 10},
            "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS},
            "optimizer": {"learning_rate": 1e-3, "schedule": "linear"},
            "checkpoint": {"directory": f"{place}/run"},
            "seed": seed,
        }
        options = write_config(Path(place) / "run.yaml", config)
        noisy = ["--model.dtype", "bfloat16"] if noise == "bfloat16" else []
        others = write_config(Path(place) / "sampler.yaml", config, *noisy)
        trainer = make_trainer(options, Console(file=io.StringIO()))
        source = trainer.source
        assert isinstance(source, InProcessSource)
        sampling = make_policy(others, trainer.ranks, frozen=True)
        trainer.observers.add(OldWeights(source, trainer.policy, sampling, staleness, noise))
        start, ended = time.perf_counter(), "steps"
        try:
            trainer.run()
        except Exception as error:  # an objective that breaks is a result
            ended = f"{type(error).__name__}: {error}"[:200]
        steps = read_json_lines(Path(place) / "run" / "metrics.jsonl")
        evaluations = read_json_lines(Path(place) / "run" / "evaluation.jsonl")
    accuracy = {line["step"]: line["sampled_reward"] for line in evaluations}
    return {
        "task": task, "objective": objective, "staleness": staleness, "noise": noise, "seed": seed, "ended": ended,
        "before": accuracy[0], "final": accuracy[max(accuracy)], "best": max(accuracy.values()),
        "steps_to_90": next((step for step, value in sorted(accuracy.items()) if value >= 0.9), None),
        "accuracy": accuracy, "largest_norm": max(line["grad_norm"] for line in steps),
        "clipped": statistics.mean(line.get("clipped_fraction", 0.0) or 0.0 for line in steps),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def cells(given: argparse.Namespace) -> Iterator[tuple[str, str, int, str, int]]:
    """List the runs, those that tell most first."""
    for seed, task in itertools.product(given.seeds, given.tasks):
        for staleness in sorted(STALENESS, key=lambda steps: (steps not in (0, 16), steps)):
            yield from ((task, objective, staleness, "none", seed) for objective in OBJECTIVES)
        for noise, staleness in itertools.product(NOISES[1:], NOISY_STALENESS):
            yield from ((task, objective, staleness, noise, seed) for objective in OBJECTIVES)


def make_runs(given: argparse.Namespace) -> None:
    out: Path = given.out
    known = {identity(line) for line in (read_json_lines(out) if out.exists() else ())}
    wanted = [cell for cell in cells(given) if cell not in known]
    folder, end = out.with_suffix(".bases"), time.time() + given.seconds
    # New interpreters: each sees no GPU and has one thread.
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn"), initializer=start) as pool:
        for made in [pool.submit(make_base, folder, *base) for base in dict.fromkeys((c[0], c[-1]) for c in wanted)]:
            made.result()
        print(f"{len(wanted)} runs to make", flush=True)
        for future in as_completed([pool.submit(run_before, end, folder, cell) for cell in wanted]):
            if (error := future.exception()) is not None:
                print(f"a run could not be made: {error!r}", flush=True)
            if error is not None or (line := future.result()) is None:
                continue
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{identity(line)}: {line['before']:.0%} -> {line['final']:.0%}, {line['seconds']} s", flush=True)


def start() -> None:
    torch.set_num_threads(1)


def run_before(end: float, folder: Path, cell: tuple[str, str, int, str, int]) -> dict[str, Any] | None:
    """Make a run, if it can begin before a time of the clock."""
    return None if time.time() > end else run(folder, *cell)


def identity(line: dict[str, Any]) -> tuple[str, str, int, str, int]:
    return line["task"], line["objective"], line["staleness"], line["noise"], line["seed"]


COLUMNS = [(steps, "none") for steps in STALENESS] + [(steps, name) for name in NOISES[1:] for steps in NOISY_STALENESS]
COLLAPSE = 0.1  # a run has collapsed whose last accuracy is that far below its best, or below that before training


def collapsed(line: dict[str, Any]) -> bool:
    return line["ended"] != "steps" or line["final"] < line["before"] or line["final"] < line["best"] - COLLAPSE


def cell_of(
    lines: Sequence[dict[str, Any]], task: str, objective: str, column: tuple[int, str]
) -> list[dict[str, Any]]:
    wanted = (task, objective, *column)
    return [line for line in lines if (line["task"], line["objective"], line["staleness"], line["noise"]) == wanted]


def title_of(column: tuple[int, str]) -> str:
    steps, noise = column
    return f"{steps} old" if noise == "none" else f"{noise}, {steps} old"


def text_of(found: Sequence[dict[str, Any]]) -> str:
    """Write the runs of a cell: the mean of the last accuracy, its least and largest, and what else there is to say."""
    if not found:
        return ""
    last = [100 * line["final"] for line in found]
    parts = [f"{statistics.mean(last):.0f}" + (f" ({min(last):.0f}–{max(last):.0f})" if len(last) > 1 else "")]
    reached = [line["steps_to_90"] for line in found if line["steps_to_90"] is not None]
    if 2 * len(reached) > len(found):
        parts.append(f"@{statistics.median_low(reached)}")
    if fallen := sum(map(collapsed, found)):
        parts.append(f"↓{fallen}")
    return " ".join(parts)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write a table for each task: the last held-out accuracy in percent, as the mean of the seeds (the least and the
    largest); `@` the step at which most seeds had 90%; `↓` the number of runs that collapsed."""
    parts = []
    for task in dict.fromkeys(line["task"] for line in lines):
        columns = [
            column for column in COLUMNS if any(cell_of(lines, task, objective, column) for objective in OBJECTIVES)
        ]
        rows = [f"| {task} digits | " + " | ".join(map(title_of, columns)) + " |", "| --- " * (len(columns) + 1) + "|"]
        for objective in OBJECTIVES:
            texts = [text_of(cell_of(lines, task, objective, column)) for column in columns]
            rows.append(f"| {objective} | " + " | ".join(texts) + " |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def figure(lines: Sequence[dict[str, Any]]) -> str:
    """Draw the table as cells whose colour is the mean of the last accuracy, from red (0) to green (1)."""
    cell, left, top, row = 84, 210, 56, 26
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    height = sum(top + row * len(OBJECTIVES) for _ in tasks) + 12
    width = left + cell * len(COLUMNS) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="Last accuracy of each objective">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    y = 0
    for task in tasks:
        parts.append(f'<text x="12" y="{y + 22}" font-size="15">{task} digits: last held-out accuracy</text>')
        for number, column in enumerate(COLUMNS):
            x = left + cell * number + cell / 2
            parts.append(f'<text x="{x}" y="{y + 46}" text-anchor="middle" font-size="10">{title_of(column)}</text>')
        for line_number, objective in enumerate(OBJECTIVES):
            place = y + top + row * line_number
            parts.append(f'<text x="{left - 8}" y="{place + 17}" text-anchor="end">{objective}</text>')
            for number, column in enumerate(COLUMNS):
                found = cell_of(lines, task, objective, column)
                if found:
                    mean = statistics.mean(line["final"] for line in found)
                    x = left + cell * number
                    parts.append(
                        f'<rect x="{x + 1}" y="{place + 1}" width="{cell - 2}" height="{row - 2}" '
                        f'fill="hsl({120 * mean:.0f} 55% 80%)"/>'
                        f'<text x="{x + cell / 2}" y="{place + 17}" text-anchor="middle">{mean:.0%}</text>'
                    )
        y += top + row * len(OBJECTIVES)
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="make runs, and add them to this file")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument("--figure", type=Path, help="with --table: also draw it here")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this much time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    given = parser.parse_args()
    if given.out is not None:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        make_runs(given)
    if given.table is not None:
        lines = read_json_lines(given.table)
        print(table(lines))
        if given.figure is not None:
            given.figure.write_text(figure(lines))


if __name__ == "__main__":
    main()
