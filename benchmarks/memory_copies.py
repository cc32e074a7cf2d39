"""The state in memory (`checkpoint.in_memory_every`): how much longer steps are, and its memory beside the plan's.

    torchrun --nproc-per-node 1 benchmarks/memory_copies.py [--every 5]
    torchrun --nproc-per-node 2 benchmarks/memory_copies.py --device cpu --layers 12 --hidden 768 --intermediate 2048 \
        --vocabulary 32768 --heads 12 --tokens 1024 --micro-batches 2 --length 256

A random model of Qwen3's shape, supervised, as in saves.py. Blocks of steps without copies take turns with blocks that
begin with one. A step is counted from one gradient to the next. `longer` compares the means of both, after a warm-up
in which the memory is made. The memory of the copies, which keepers hold, is compared with what `plan` says of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from saves import GIB, options, prepare

from truestep.config.schema import Config
from truestep.metrics.observers import Observer
from truestep.plan.advice import layout_of
from truestep.plan.memory import kept_bytes
from truestep.plan.shape import read_shape
from truestep.ranks.elastic import Agent
from truestep.ranks.group import leave
from truestep.run.assemble.policy import join_ranks
from truestep.run.checkpoint.memory import Memory, MemoryStore
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.staging import SharedStaging
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer


def keep(trainer: Trainer, folder: Path) -> tuple[Memory, Saves]:
    memory = Memory.open(trainer.ranks, folder, Agent(os.getppid(), 1, 2), None, 1)
    memory.say = lambda sentence: print(sentence, file=sys.stderr)
    memory.begin(0.0)
    staging = SharedStaging()
    return memory, Saves(MemoryStore(memory, staging, lambda: None), trainer.ranks, staging)


def memory_files() -> int:
    """Count the bytes of the memory that this rank has copied its state to, and that keepers may hold."""
    found = {}
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{handle}").startswith("/memfd:truestep"):
                facts = os.stat(f"/proc/self/fd/{handle}")
                found[facts.st_ino] = facts.st_blocks * 512
    return sum(found.values())


def measure(trainer: Trainer, saves: Saves, every: int, warm_up: int, device: str) -> dict[str, Any]:
    """Make the steps; return the seconds of those with and without copies."""
    began: list[float] = []
    block = every * -(-5 // every)  # steps
    trainer.save_rule = replace(trainer.save_rule, in_memory_every=every)

    def copies(step: int) -> bool:
        return step < warm_up or step // block % 2 == 1

    class Looks(Observer):
        def gradient(self, *_: object) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            began.append(time.perf_counter())
            step = len(began)  # whose gradient is there
            rule = replace(trainer.save_rule, in_memory_every=1 if step < warm_up else every)
            trainer.save_rule, trainer.memory = rule, saves if copies(step) or saves.under_way else None

    trainer.observers.add(Looks())
    trainer.run()
    found: dict[bool, list[float]] = {True: [], False: []}
    for step in range(-(-warm_up // block) * block + block, len(began)):  # whole blocks
        found[copies(step)].append(began[step] - began[step - 1])
    means = {kind: statistics.fmean(seconds) for kind, seconds in found.items()}
    metrics = [json.loads(line) for line in (trainer.directory.path / "metrics.jsonl").read_text().splitlines()]
    waited = [line.get("time/save", 0.0) for line in metrics if line["step"] >= 2 * block]
    return {
        "waits_for_copies": statistics.fmean(waited) * 2 / means[False],  # copies are made in half of the steps
        "steps": {str(kind): [round(each, 3) for each in seconds] for kind, seconds in found.items()},
        "without": means[False],
        "with": means[True],
        "longer": means[True] / means[False] - 1,
        "longer_by_medians_of_others": means[True] / statistics.median(found[False]) - 1,
    }


def main() -> None:
    given = options()
    device = {"model": {"path": "", "device": given.device}, "data": {"path": ""}, "loss": {"type": "cross_entropy"}}
    ranks = join_ranks(Config.model_validate(device))
    folder = Path(ranks.share(lambda: str(given.folder or tempfile.mkdtemp())))
    prepared = prepare(given, folder, ranks)
    prepared["checkpoint"] |= {"every": 10**6, "in_memory_every": given.every}
    config = Config.model_validate(prepared)
    trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks)
    trainer.save_rule = replace(trainer.save_rule, never=True)
    memory, saves = keep(trainer, folder / "run")
    found = measure(trainer, saves, given.every, given.warm_up, given.device)
    held = sum(ranks.gather(memory_files()))
    layout = layout_of(config, ranks.size)
    planned = kept_bytes(config, read_shape(config), layout) * ranks.size
    memory.end()
    told = ranks.gather(found)
    if ranks.first:
        weights = sum(piece.shape.numel() for piece in trainer.policy.weights.pieces.values())
        print(f"{weights / 1e9:.3f} billion weights, {ranks.size} ranks, a copy every {given.every} steps")
        seconds, plain, longer = (told[0][name] for name in ("with", "without", "longer"))
        print(f"steps are longer by {100 * longer:.2f}%: {seconds:.4f} s, {plain:.4f} s without copies")
        print(f"of a step {100 * told[0]['waits_for_copies']:.2f}% wait for a copy that is not complete")
        off = held / planned - 1
        print(f"copies take {held / GIB:.3f} GiB, and the plan says {planned / GIB:.3f}: {100 * off:+.1f}%")
        for number, rank in enumerate(told):
            print(f"rank {number}: " + json.dumps(rank))
    leave()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
