"""What a thousand ranks cost each of them on its host: plans, digests, and a checkpoint's index, checks and resume.

    python benchmarks/many_ranks.py [--ranks 1024] [--documents 262144] [--resumed 768] [--layers 28]

One process computes what each rank would do, on the CPU alone, and measures one rank after another. Documents have 64
to 512 tokens and come in groups of 8 with a prompt that they share. The checkpoint has tensors as Qwen3-1.7B has, with
AdamW's states, sharded by rows as FSDP does, but with rows of `--width` numbers, so that it fits a disk. Seconds are
those of the process, the best of `--runs`: others may use the machine.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks
from truestep.rollouts.digests import digests_of
from truestep.run.checkpoint.checksums import MANIFEST, write_checksums
from truestep.run.checkpoint.comparison import Comparison, Told, shares_of
from truestep.step.plan import trees
from truestep.step.plan.agreement import digests_of_plan
from truestep.step.plan.plan import StepRule, plan_exactly, totals_of
from truestep.step.plan.trees import Spread, find_items, parts_of_groups
from truestep.types import Rollout, StepPlan
from truestep.weights.tensor_parts import (
    FOLDER,
    INDEX,
    Box,
    StoredTensors,
    TensorPart,
    describe_parts,
    part_name,
    write_index,
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--resumed", type=int, default=768, help="ranks that go on from the checkpoint")
    parser.add_argument("--documents", type=int, default=262_144, help="of a step")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=16, help="numbers of a row of a weight")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


def seconds(work: Callable[[], Any], runs: int) -> float:
    """Return the least seconds of this process."""
    found = []
    for _ in range(runs):
        gc.collect()
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


# ---- a step's documents


def make_documents(count: int) -> list[Rollout]:
    draw, made = np.random.default_rng(0), list[Rollout]()
    for number in range(count):
        if number % 8 == 0:
            prompt = draw.integers(1, 50_000, draw.integers(32, 128))
        ids = np.concatenate([prompt, draw.integers(1, 50_000, draw.integers(32, 384))])
        mask = np.arange(len(ids)) >= len(prompt)
        advantages = np.where(mask, np.float32(draw.normal()), np.float32(0))
        values = {"logprobs": np.zeros(len(ids), np.float32), "reward": 1.0, "group_id": str(number // 8)}
        made.append(Rollout(f"document-{number}", ids, mask, advantages=advantages, **values))
    return made


def plan_costs(documents: list[Rollout], ranks: int, runs: int) -> dict[str, float]:
    """Return the seconds of one rank's part in a step's plan."""
    rule = StepRule(len(documents), False, 1, 1, 16_384, ranks, even_length=8000.0)
    plans = list[StepPlan]()  # all kept: to free one takes longer than to digest it
    shared = StepRule(len(documents), False, 1, 1, 16_384, ranks, even_length=8000.0, share="always")
    parts, gathered = parts_of_groups(documents, ranks), list[Any]()
    for part in parts:  # what the others would send
        found = find_items(documents[part.start : part.stop], (), shared.least_saved, [16_384], 8000.0)
        gathered.append([each.moved(part.start) for each in found])
    seen = trees._digest(documents)
    spread = Spread(
        ranks // 2, lambda own: [trees._Found(seen, found * len(own.items)) for found in gathered]
    )  # one for each limit
    trees._SPREAD = 1  # also of small steps
    own, made = documents[ranks // 2 :: ranks], iter(plans)  # a run digests a plan once, as it was made
    return {
        "plan": seconds(lambda: plans.append(plan_exactly(documents, rule, 0)), runs),
        "plan, prefixes shared": seconds(lambda: plan_exactly(documents, shared, 0, spread), runs),
        "counting": seconds(lambda: totals_of(documents), runs),
        "digest of the plan": seconds(lambda: digests_of_plan(next(made), ranks // 2), runs),
        "digests for the ledger": seconds(lambda: digests_of(own, False), runs),
    }


# ---- a checkpoint


def shapes_of(layers: int, width: int) -> dict[str, tuple[int, int]]:
    rows = {"q": 2048, "k": 1024, "v": 1024, "o": 2048, "gate": 6144, "up": 6144, "down": 2048, "norm": 2048}
    named = {f"layers.{number}.{name}": (size, width) for number in range(layers) for name, size in rows.items()}
    named["embedding"] = (151_936, width)
    return {
        f"{kind}{name}{state}": shape
        for name, shape in named.items()
        for kind, state in (("weight/", ""), ("optimizer/", ".exp_avg"), ("optimizer/", ".exp_avg_sq"))
    }


def shard(shape: tuple[int, int], ranks: int, rank: int) -> Box:
    """Return a rank's rows, as FSDP divides them."""
    each = -(-shape[0] // ranks)
    start = min(rank * each, shape[0])
    return Box((start, 0), (min(each, shape[0] - start), shape[1]))


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, int]], ranks: int) -> None:
    (folder / FOLDER).mkdir(parents=True)
    described = []
    for rank in range(ranks):
        boxes = {key: shard(shape, ranks, rank) for key, shape in shapes.items()}
        parts = [
            TensorPart(key, shapes[key], box.start, torch.full(box.shape, float(rank)))
            for key, box in boxes.items()
            if box.numbers
        ]
        file = folder / FOLDER / part_name(rank)
        save_file({part.key: part.values for part in parts}, file)
        described.append(describe_parts(file, parts))
    write_index(folder / FOLDER, described)
    write_checksums(folder)


@dataclass
class Reads:
    """What a rank reads of the parts at its resume, in bytes."""

    own: int  # of its part
    values: int  # that it loads
    both: int  # that it loads or compares with their checksums: what it compares, its host has then in memory


class Resume:
    """A checkpoint that ranks go on from, one after another."""

    def __init__(self, folder: Path, shapes: dict[str, tuple[int, int]], ranks: int):
        self._folder, self._shapes, self._ranks = folder, shapes, ranks
        self._comparison, self._stored = Comparison(folder), StoredTensors(folder)
        self.told: list[Told] = []

    def of(self, rank: int) -> Reads:
        """Do what a rank does, and count what it reads."""
        shares = shares_of(Ranks(rank, RankLayout(data_shard=self._ranks)))
        spans: dict[str, list[tuple[int, int]]] = {}
        for piece in self._comparison.pieces(shares):
            spans.setdefault(Path(piece.name).name, []).append((piece.start, piece.stop))
        self.told.append(self._comparison.read(shares))
        boxes = {key: box for key, shape in self._shapes.items() if (box := shard(shape, self._ranks, rank)).numbers}
        values = 0
        for key, box in boxes.items():
            self._stored.read(key, box)
            for place, part in self._stored._entries[key].common(box):
                row = 4 * part.shape[1]
                start = place.byte + (part.start[0] - place.box.start[0]) * row
                spans.setdefault(place.file.name, []).append((start, start + part.shape[0] * row))
                values += part.shape[0] * row
        both = sum(joined_length(each) for name, each in spans.items() if name.startswith("part-"))
        return Reads(sum(4 * box.numbers for box in boxes.values()), values, both)

    def damages(self) -> dict[str, str]:
        """Return what all ranks together found."""
        return self._comparison.damages(self.told)


def joined_length(spans: list[tuple[int, int]]) -> int:
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def main() -> None:
    given = options()
    documents = make_documents(given.documents)
    gc.freeze()
    print(f"{given.documents:,} documents a step, {given.ranks:,} ranks; seconds of one rank")
    for name, spent in plan_costs(documents, given.ranks, given.runs).items():
        print(f"  {name:28}{spent:9.3f}")
    del documents
    with tempfile.TemporaryDirectory() as directory:
        folder, shapes = Path(directory) / "checkpoint", shapes_of(given.layers, given.width)
        write_checkpoint(folder, shapes, given.ranks)
        tables = {name: (folder / FOLDER / name).stat().st_size for name in (INDEX, Path(MANIFEST).name)}
        print(f"a checkpoint of {given.ranks:,} parts, {len(shapes)} tensors; bytes of its tables: {tables}")
        spent = seconds(partial(find_and_open, folder, given.resumed), given.runs)
        print(f"  manifest and index, read and checked {spent:9.3f}")
        resumes = Resume(folder, shapes, given.resumed)
        reads = [resumes.of(rank) for rank in range(given.resumed)]
        assert resumes.damages() == {}
    print(f"a resume at {given.resumed}: bytes loaded, of a rank's part: at most {most(reads, 'values'):.3f}")
    print(f"  loaded or compared with checksums, of the largest part: at most {most(reads, 'both'):.3f}")


def most(reads: list[Reads], what: str) -> float:
    if what == "both":
        return max(read.both for read in reads) / max(read.own for read in reads)
    return max(read.values / read.own for read in reads if read.own)


def find_and_open(folder: Path, ranks: int) -> None:
    """Do what the first rank does, in another layout than the checkpoint's."""
    told = Comparison(folder).read(shares_of(Ranks(0, RankLayout(data_shard=ranks))))
    assert not told.problems
    StoredTensors(folder)


if __name__ == "__main__":
    main()
