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
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import studies
from studies import Sampler, Study, follow, make_runs, rl_config, text_of, to_int8, unchanged, write_config

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


def make_base(folder: Path, task: str, seed: int) -> Path:
    digits, right = TASKS[task]
    return studies.make_base(folder / f"{task}-{seed}", digits, right, seed, make_model, {})


def run(folder: Path, task: str, objective: str, staleness: int, noise: str, seed: int) -> dict[str, Any]:
    checkpoint, digits = make_base(folder, task, seed), TASKS[task][0]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        config = rl_config(folder / f"{task}-{seed}", checkpoint, digits, seed, directory)
        config["loss"] |= OBJECTIVES[objective]
        config["sampler"]["top_p"] = 0.9 if noise == "top_p" else 1.0
        options = write_config(Path(place) / "run.yaml", config)
        noisy = ["--model.dtype", "bfloat16"] if noise == "bfloat16" else []
        sampler = write_config(Path(place) / "sampler.yaml", config, *noisy)
        change = to_int8 if noise == "int8" else unchanged
        line, _ = follow(options, Sampler(sampler, staleness, change), directory)
    cell = {"task": task, "objective": objective, "staleness": staleness, "noise": noise, "seed": seed}
    return cell | line


def cells(given: argparse.Namespace) -> Iterator[tuple[str, str, int, str, int]]:
    """List the runs, those that tell most first."""
    for seed, task in itertools.product(given.seeds, given.tasks):
        for staleness in sorted(STALENESS, key=lambda steps: (steps not in (0, 16), steps)):
            yield from ((task, objective, staleness, "none", seed) for objective in OBJECTIVES)
        for noise, staleness in itertools.product(NOISES[1:], NOISY_STALENESS):
            yield from ((task, objective, staleness, noise, seed) for objective in OBJECTIVES)


FIELDS = ("task", "objective", "staleness", "noise", "seed")
STUDY = Study(FIELDS, make_base, lambda cell: (cell[0], cell[-1]), run)
COLUMNS = [(steps, "none") for steps in STALENESS] + [(steps, name) for name in NOISES[1:] for steps in NOISY_STALENESS]


def cell_of(
    lines: Sequence[dict[str, Any]], task: str, objective: str, column: tuple[int, str]
) -> list[dict[str, Any]]:
    wanted = (task, objective, *column)
    return [line for line in lines if (line["task"], line["objective"], line["staleness"], line["noise"]) == wanted]


def title_of(column: tuple[int, str]) -> str:
    steps, noise = column
    return f"{steps} old" if noise == "none" else f"{noise}, {steps} old"


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
                ends = [line["final"] for line in cell_of(lines, task, objective, column) if line["final"] is not None]
                if ends:
                    mean = statistics.mean(ends)
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
        make_runs(STUDY, list(cells(given)), given.out, given.jobs, given.seconds)
    if given.table is not None:
        lines = STUDY.read(given.table)
        print(table(lines))
        if given.figure is not None:
            given.figure.write_text(figure(lines))


if __name__ == "__main__":
    main()
