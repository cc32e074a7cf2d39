"""Which runs of a tiny mixture of experts survive old weights and a sampler in bfloat16, with and without replay.

    python benchmarks/replay_study.py --out replay.jsonl [--jobs 16] [--seconds 400] [--seeds 0 1 2 3 4]
    python benchmarks/replay_study.py --table replay.jsonl

The task is the demo's (put four digits in order), the model examples/experts' (8 experts, 2 of each token, in two of
three layers), trained in float32 with `grpo`. Documents are sampled from weights that are `staleness` steps old, by a
model that computes in float32 or bfloat16. With replay `auto` their tokens are trained with the experts that this model
chose, with `off` with those that the policy's routers choose. One line of JSON for each run; runs that the file has are
not made again. The runs of a seed begin with the same base model. A run takes one CPU core for half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # examples

import studies
from examples.experts.echo import make_model
from studies import Line, Sampler, Study, collapsed, follow, make_runs, mean_of, rl_config, text_of, write_config

REPLAY = ("auto", "off")
STALENESS = (0, 2, 8)
SAMPLERS = ("float32", "bfloat16")
SEEDS = (0, 1, 2, 3, 4)
DIGITS, RIGHT = 4, 0.35  # digits to sort, and how often the corpus of the base model answers rightly: the demo's
BALANCE = {"balance": "loss", "strength": 0.01}  # the example's


def make_base(folder: Path, seed: int) -> Path:
    return studies.make_base(folder / str(seed), DIGITS, RIGHT, seed, make_model, {"experts": BALANCE})


def run(folder: Path, replay: str, staleness: int, sampler: str, seed: int) -> Line:
    checkpoint = make_base(folder, seed)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "run"
        config = rl_config(folder / str(seed), checkpoint, DIGITS, seed, directory)
        config["model"]["experts"] = {"replay": replay, **BALANCE}
        options = write_config(Path(place) / "run.yaml", config)
        samples = write_config(Path(place) / "sampler.yaml", config, "--model.dtype", sampler)
        line, steps = follow(options, Sampler(samples, staleness, frozen=False), directory)
    replayed = mean_of(steps, "replayed_tokens") or 0.0
    if (replayed > 0.5) != (replay == "auto") and steps:
        raise RuntimeError(f"replay: {replay} trained {replayed:.0%} of the tokens with recorded experts")
    means = {
        "kl": mean_of(steps, "kl_new_old"),
        "outside": mean_of(steps, "clipped_ratio_fraction"),
        "other_routes": mean_of(steps, "route_disagreement"),
    }
    return {"replay": replay, "staleness": staleness, "sampler": sampler, "seed": seed} | line | means


STUDY = Study(("replay", "staleness", "sampler", "seed"), make_base, lambda cell: (cell[-1],), run)


def cells(seeds: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """List the runs: all those of a seed before the next."""
    for seed in seeds:
        yield from ((*cell, seed) for cell in itertools.product(REPLAY, STALENESS, SAMPLERS))


ACCURACY = f"""\
The last held-out accuracy in percent, after {studies.STEPS} steps of {studies.DOCUMENTS} documents: how many runs
survived; the mean (the least and the largest); `@` the step at which most had 90%; `↓` the number that collapsed (the
end is {100 * studies.COLLAPSE:.0f} points below the best, or below the beginning)."""
GAPS = """\
Means over the steps: KL to the sampler, tokens outside the clip's bounds, and the share of the replayed choices that
the policy's router would not have made."""


def table(lines: Sequence[Line]) -> str:
    def rows(write: Callable[[Sequence[Line]], str]) -> str:
        titles = ("sampler", "replay", *(f"{steps} old" for steps in STALENESS))
        made = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
        for sampler, replay in itertools.product(SAMPLERS, REPLAY):
            found = [
                [line for line in lines if [line[name] for name in STUDY.fields[:3]] == [replay, steps, sampler]]
                for steps in STALENESS
            ]
            made.append(f"| {' | '.join((sampler, replay, *map(write, found)))} |")
        return "\n".join(made)

    return f"{ACCURACY}\n\n{rows(survivors)}\n\n{GAPS}\n\n{rows(gaps)}"


def survivors(found: Sequence[Line]) -> str:
    if not found:
        return ""
    return f"{sum(not collapsed(line) for line in found)} of {len(found)}: {text_of(found)}"


def gaps(found: Sequence[Line]) -> str:
    kl, outside, other = (mean_of(found, name) for name in ("kl", "outside", "other_routes"))
    if kl is None or outside is None:
        return ""
    return f"{kl:.1e}, {outside:.2%}" + ("" if other is None else f", {other:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="make runs, add them to this file, and print its table")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one core")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no run after this much time")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    given = parser.parse_args()
    if given.out is None and given.table is None:
        parser.error("--out or --table is needed")
    if given.out is not None:
        print(f"{os.cpu_count()} CPU cores, torch {torch.__version__}, Python {platform.python_version()}", flush=True)
        make_runs(STUDY, list(cells(given.seeds)), given.out, given.jobs, given.seconds)
    print(table(STUDY.read(given.table or given.out)))


if __name__ == "__main__":
    main()
