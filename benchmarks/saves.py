"""Saves of a run: what they take of steps and of host memory, and whether a run goes on from one bit for bit.

    torchrun --nproc-per-node 2 benchmarks/saves.py [--steps 81 --every 20]
    torchrun --nproc-per-node 2 benchmarks/saves.py --device cpu --layers 8 --hidden 512 --intermediate 1536 \
        --vocabulary 16384 --tokens 2048

A random model of Qwen3's shape, supervised, documents of one length, so that all steps are alike. A step is counted
from one gradient to the next, with all that is between them. Steps that save, and those while a checkpoint is written,
are compared with the others. Host memory is what is a process's own (RssAnon and RssShmem, where pinned memory counts),
looked at 50 times a second; a rank's part is what it stages. The memory that it stages to, as large as the part, is
made after the first step: `grown` is what comes beside it. Then the run is made anew from its last checkpoint, and
weights and states are compared by sums of their bits. `all_steps` has each step by its number: how long it took, as a
multiple of the median of those that do not save, and meanwhile the seconds of Python's garbage collections and those
of processors that another machine of the host had. `--in-step` waits for each save, as the comparison. `--every` as
large as `--steps` makes one checkpoint, at the end, and tells of it alone.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from qwen import add_shape, write_model
from rich.console import Console

from truestep.config.schema import Config
from truestep.metrics.observers import Observer
from truestep.ranks.group import Ranks, leave
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer

GIB = 2**30


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=1024, help="of a document")
    parser.add_argument("--steps", type=int, default=81)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=12, help="steps that are not counted")
    parser.add_argument("--in-step", action="store_true", help="wait for each save")
    parser.add_argument("--offload", choices=("none", "states", "all"), default="none")
    parser.add_argument("--compile", action="store_true", help="the layers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="where the run's files go; a new one by default")
    return parser.parse_args()


class Memory:
    """The largest memory of a process's own, since it was last asked for."""

    def __init__(self) -> None:
        self._most = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._most = max(self._most, self.now())
            time.sleep(0.02)

    @staticmethod
    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return sum(float(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))

    def most(self) -> float:
        most, self._most = max(self._most, self.now()), 0.0
        return most


class Collections:
    """The seconds that Python's own collections of unused objects took."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        gc.callbacks.append(self._seen)

    def _seen(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


def taken_by_others() -> float:
    """The seconds of all this machine's processors that other machines of the same host had."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")


def prepare(given: argparse.Namespace, folder: Path, ranks: Ranks) -> dict[str, Any]:
    documents = given.steps * given.micro_batches * (given.tokens // given.length) * ranks.size

    def write() -> None:
        write_model(folder / "model", given, device=given.device)
        draw = np.random.default_rng(0)
        with (folder / "rollouts.jsonl").open("w") as file:
            for number in range(documents):
                ids = draw.integers(0, given.vocabulary, given.length).tolist()
                file.write(json.dumps({"id": str(number), "input_ids": ids, "prompt_length": 16}) + "\n")

    ranks.share(write)
    return {
        "model": {
            "path": str(folder / "model"),
            "device": given.device,
            "activation_checkpointing": True,
            "compile": given.compile,
        },
        "loss": {"type": "cross_entropy"},
        "data": {"path": str(folder / "rollouts.jsonl"), "tokens_per_microbatch": given.tokens, "advantages": "none"},
        "schedule": {"docs_per_step": documents // given.steps, "stall_timeout": 1800},
        "optimizer": {"learning_rate": 1e-5, "offload": given.offload},
        "checkpoint": {"directory": str(folder / "run"), "every": given.every, "keep": 1},
        "logging": {"console": False},
    }


def fingerprint(trainer: Trainer) -> dict[str, int]:
    """Sum the bits of each part of a weight and of its states."""
    found = {}
    for name, master in trainer.policy.weights.master.items():
        states = dict(trainer.optimizer.state[master].items())
        for kind, value in {"weight": master.detach(), **states}.items():
            flat = value.contiguous().view(-1).to(trainer.policy.device)
            bits = flat.view(torch.int32 if value.element_size() == 4 else torch.uint8)
            places = torch.arange(1, len(bits) + 1, device=bits.device) % 65_521
            found[f"{name} {kind}"] = int((bits.long() * places).sum())
    return found


@dataclass(frozen=True)
class Gradient:
    """What was seen when a step's gradient was there."""

    at: float
    processor: float  # seconds of this process's so far
    most: float  # bytes of memory since the gradient before
    saving: bool  # a save was under way
    collected: float  # seconds of Python's collections so far
    taken: float  # seconds that other machines had so far


@dataclass(frozen=True)
class Step:
    """What lies between two gradients."""

    number: int
    seconds: float
    processor: float
    saves: bool  # its save begins here
    overlaps: bool  # it saves, or a save is under way
    collected: float
    taken: float


def steps_of(seen: list[Gradient], given: argparse.Namespace) -> list[Step]:
    """From the gradient of step i to that of step i + 1: step i's checkpoint is begun between them, if it has one."""
    found = []
    for number in range(given.warm_up, given.steps - 1):
        before, now = seen[number - 1], seen[number]
        saves = number % given.every == 0
        found.append(
            Step(
                number,
                now.at - before.at,
                now.processor - before.processor,
                saves,
                saves or before.saving or now.saving,
                now.collected - before.collected,
                now.taken - before.taken,
            )
        )
    return found


def measure(given: argparse.Namespace, trainer: Trainer) -> dict[str, Any]:
    memory, collections, seen = Memory(), Collections(), list[Gradient]()

    class Looks(Observer):
        def gradient(self, *_: object) -> None:
            look()

    def look() -> None:
        if given.device == "cuda":
            torch.cuda.synchronize()
        now, processor = time.perf_counter(), time.process_time()
        under_way, taken = trainer.saves.under_way, taken_by_others()
        seen.append(Gradient(now, processor, memory.most(), under_way, collections.seconds, taken))
        if trainer.ranks.first and len(seen) % 10 == 0:
            print(f"{len(seen)} gradients after {now - started:.0f} s", file=sys.stderr, flush=True)

    trainer.observers.add(Looks())
    if given.in_step:
        trainer.source.waits_for_checkpoints = True
    started = time.perf_counter()
    trainer.run()
    part = trainer.saves._staging._room.nbytes
    if given.every >= given.steps:
        return {
            "part_gib": part / GIB,
            "grown_at_most": (memory.most() - seen[-1].most) / part,
            "saved_after_the_last_gradient": time.perf_counter() - seen[-1].at,
            "run_seconds": time.perf_counter() - started,
        }
    steps = steps_of(seen, given)
    beside, plain = ([step for step in steps if step.overlaps == overlaps] for overlaps in (True, False))
    later = [step for step in beside if step.number >= 2 * given.every]  # than the first save
    typical = statistics.median(step.seconds for step in plain)
    usually = statistics.fmean(step.seconds for step in plain)
    usual = statistics.median(step.processor for step in plain)
    before = [gradient.most for gradient in seen[2 : given.every]]
    after = [gradient.most for gradient in seen[given.every + 1 :]]
    metrics = [json.loads(line) for line in (trainer.directory.path / "metrics.jsonl").read_text().splitlines()]
    return {
        "part_gib": part / GIB,
        "grown": (statistics.median(after) - statistics.median(before)) / part,
        "grown_at_most": (max(after) - max(before)) / part,
        "processor_seconds_of_a_step": usual,
        "and_of_a_save": sum(step.processor - usual for step in beside) / max(1, sum(step.saves for step in steps)),
        "step": typical,
        "mean_of_steps_without": usually,
        "overlapping_are_longer_by": statistics.fmean(step.seconds for step in beside) / usually - 1,
        "without_the_first_save": statistics.fmean(step.seconds for step in later) / usually - 1,
        "a_step_waits_for": [round(line["time/save"], 3) for line in metrics if "time/save" in line],
        "all_steps": [
            [step.number, round(step.seconds / typical, 3), round(step.collected, 2), round(step.taken, 2)]
            for step in steps
        ],
        "spread": statistics.quantiles((step.seconds for step in plain), n=10)[-1] / typical - 1,
        "first_save_takes": sum(step.seconds - typical for step in beside if step not in later),
        "steps_that_overlap": [round(step.seconds / typical, 4) for step in beside],
        "longer_on_average": statistics.fmean(step.seconds for step in steps) / typical - 1,
    }


def main() -> None:
    given = options()
    device = {"model": {"path": "", "device": given.device}, "data": {"path": ""}, "loss": {"type": "cross_entropy"}}
    ranks = join_ranks(Config.model_validate(device))
    folder = Path(ranks.share(lambda: str(given.folder or tempfile.mkdtemp())))
    config = Config.model_validate(prepare(given, folder, ranks))
    make = partial(make_trainer, config, Console(file=io.StringIO()), ranks=ranks)
    trainer = make()
    weights = sum(piece.shape.numel() for piece in trainer.policy.weights.pieces.values())
    found = measure(given, trainer)
    before = fingerprint(trainer)
    latest = trainer.checkpoints.latest()
    assert latest is not None
    size = sum(file.stat().st_size for file in latest.rglob("*"))
    trainer.policy.weights.master.clear()
    del trainer
    if given.device == "cuda":
        torch.cuda.empty_cache()
    start = time.perf_counter()
    resumed = make()
    found["resume_seconds"] = time.perf_counter() - start
    found["bitwise"] = fingerprint(resumed) == before
    of_ranks = ranks.gather(found)
    if ranks.first:
        print(f"{weights / 1e9:.3f} billion weights, {ranks.size} ranks, {size / GIB:.2f} GiB a checkpoint, "
              f"torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
        for number, rank in enumerate(of_ranks):
            print(f"rank {number}: " + json.dumps(rank))
    resumed.run()  # there is nothing left to do
    leave()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
