"""The LM head with its vocabulary over several GPUs, against one GPU holding all of it.

    torchrun --nproc-per-node 2 benchmarks/head_sharded.py [--shape 16384x4096x151936]

Every rank makes the same case, runs it whole, and then its slice of the vocabulary together with the others; printed
are the times and the largest differences between the two.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from head import Case, make_case, once, pack_case
from truestep.head.chunked import HeadResult, HeadRows, forward_backward
from truestep.head.logits import HeadSettings
from truestep.head.vocab_parallel import VocabularyShard
from truestep.losses.label_losses import Grpo
from truestep.losses.labels import Labels
from truestep.losses.objective import Denominator, Objective
from truestep.types import Coefficients, RowStatistics, StepTotals


def run(
    case: Case, weight: torch.Tensor, shard: VocabularyShard | None, entropy_bonus: float
) -> tuple[HeadResult, torch.Tensor]:
    tokens = len(case.labels)
    objective = Objective(Grpo(0.2, 0.2), Denominator("labels"), entropy_bonus=entropy_bonus)
    totals = StepTotals(1, tokens, tokens)
    document = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    weights = torch.full((tokens,), 1 / tokens, device="cuda")
    packed = pack_case(case, document, torch.tensor([tokens], device="cuda"))

    def loss(rows: slice, seen: RowStatistics) -> Coefficients:
        labels = Labels.of(packed[rows], seen, weights[rows])
        return objective.coefficients(labels, totals)

    settings = HeadSettings(fp32=True, chunk_size=8192)
    head = HeadRows(case.hidden, weight, packed.ids, packed.temperature, settings, shard)
    buffer = torch.zeros_like(weight, dtype=torch.float32)
    return forward_backward(head, loss, weight_gradient=buffer), buffer


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def compare(case: Case, part: torch.Tensor, shard: VocabularyShard, bonus: float) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted, wanted_buffer = run(case, case.weight, None, bonus)
    found, buffer = run(case, part, shard, bonus)
    assert wanted.hidden_gradient is not None
    assert found.hidden_gradient is not None
    differences = torch.tensor(
        [
            float((found.statistics.logprobs - wanted.statistics.logprobs).abs().max()),
            float((found.statistics.entropy - wanted.statistics.entropy).abs().max()),
            relative(found.hidden_gradient, wanted.hidden_gradient),
            relative(buffer, wanted_buffer[shard.first : shard.first + shard.size]),
        ],
        device="cuda",
    )
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    del wanted, found, wanted_buffer, buffer
    whole = timed(lambda: run(case, case.weight, None, bonus))
    together = timed(lambda: run(case, part, shard, bonus))
    if rank == 0:
        names = ("log-probs", "entropy", "d hidden (relative)", "d weight (relative)")
        print(
            f"entropy bonus {bonus}: one rank {whole:.1f} ms, {world} ranks {together:.1f} ms: {whole / together:.2f} x"
        )
        print(
            "largest differences: "
            + ", ".join(f"{n} {d:.1e}" for n, d in zip(names, differences.tolist(), strict=True))
        )


def timed(work: Callable[[], object]) -> float:
    """In ms. As often on every rank: they meet in it."""
    for _ in range(6):
        once(work)
    return statistics.median(once(work) for _ in range(5)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="16384x4096x151936")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    case = make_case(given.shape)
    for tensor in (case.hidden, case.weight, case.labels, case.old_logprobs, case.advantages):
        dist.broadcast(tensor, 0)
    vocabulary = case.weight.shape[0]
    first, last = vocabulary * rank // world, vocabulary * (rank + 1) // world
    part = case.weight[first:last].clone()
    assert dist.group.WORLD is not None
    shard = VocabularyShard(dist.group.WORLD, first, last - first)
    if rank == 0:
        print(f"{given.shape}, {world} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for bonus in (0.0, 0.01):
        compare(case, part, shard, bonus)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
