"""Weak scaling: tokens a second a rank as ranks are added, and the memory of a rank beside its arithmetic.

    torchrun --nproc-per-node 4 benchmarks/scaling.py [--tokens 16384 --micro-batches 4]
    python benchmarks/scaling.py                            # the one rank to compare with

A random model of Qwen3-1.7B's shape (tied embeddings), GRPO in bfloat16 with a float32 head and activation
checkpointing, documents of about 1,000 tokens of which half are labels, and as many micro-batches a rank however many
ranks there are. `--device cpu` with a small model only shows that it runs. `--optimizer none` times the passes and the
gradient's norm alone: a model that does not fit one GPU is compared with what two numbers of its layers take on one,
of which the time of all layers follows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from qwen import add_shape, write_model

from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks, join
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import kernels_serve, make_adamw, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.types import Rollout

GIB = 2**30


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape(parser)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=1000, help="of documents, about")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of logits at a time")
    parser.add_argument("--steps", type=int, default=4, help="timed, after two that are not")
    parser.add_argument("--data-replicate", type=int, default=1)
    parser.add_argument("--reduce-each", action="store_true", help="gradients after every micro-batch")
    parser.add_argument("--breadth-first", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--optimizer", choices=("adamw", "none"), default="adamw")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def make_policy(given: argparse.Namespace, ranks: Ranks) -> Policy:
    def write() -> str:
        directory = tempfile.mkdtemp()
        write_model(Path(directory), given, device=given.device, head_size=given.head_size)
        return directory

    directory = ranks.share(write)
    if given.device == "cuda":
        torch.cuda.empty_cache()
    return load_policy(
        Path(directory),
        dtype="bfloat16",
        device=given.device,
        head=HeadSettings(fp32=True, chunk_size=given.chunk),
        activation_checkpointing=True,
        compiled=given.compile,
        ranks=ranks,
        reduce_each=given.reduce_each,
    )


def make_documents(given: argparse.Namespace, ranks: Ranks) -> list[Rollout]:
    """The same on every rank: enough to fill each one's micro-batches, and no more."""
    draw = np.random.default_rng(0)
    documents: list[Rollout] = []
    for _ in range(given.micro_batches * ranks.size):
        room = given.tokens
        while room > 0:
            length = min(room, int(given.length * draw.uniform(0.5, 1.5)))
            if room - length < 8:
                length = room
            mask = np.arange(length) >= length // 2
            mask[0] = False
            room -= length
            documents.append(
                Rollout(
                    id=str(len(documents)),
                    input_ids=draw.integers(0, given.vocabulary, length),
                    loss_mask=mask,
                    logprobs=np.where(mask, -12.0, 0.0).astype(np.float32),
                    advantages=np.where(mask, draw.normal(), 0.0).astype(np.float32),
                )
            )
    return documents


def arithmetic(policy: Policy, given: argparse.Namespace, ranks: Ranks) -> dict[str, float]:
    """GiB of a rank, by what it is for."""
    total = sum(int(np.prod(parameter.shape)) for parameter in policy.model.parameters())
    head = policy.vocabulary_size * given.hidden
    layer = (total - head) / given.layers
    one = ranks.shards == 1
    unreduced = 0.0 if one else 4 * (total if given.micro_batches > 1 and not given.reduce_each else layer)
    parts = {
        "float32 weights, two moments, gradients": 16 * total / ranks.shards,
        "gradients until they are reduced": unreduced + (0 if one else 4 * head * (given.micro_batches == 1)),
        "weights as they compute (bfloat16)": 2 * total if one else 2 * (2 * layer + head),
        "a chunk of logits": given.chunk * policy.vocabulary_size * (4 + 2),
        "kept activations, a layer's input each": given.tokens * given.hidden * 2 * given.layers,
        "one layer's recomputed activations": given.tokens * (16 * given.hidden + 4 * given.intermediate) * 2,
    }
    return {name: size / GIB for name, size in parts.items()}


def main() -> None:
    given = options()
    ranks = join(RankLayout(data_replicate=given.data_replicate), device=given.device, stall_timeout=600)
    policy = make_policy(given, ranks)
    even = policy.facts.even_length
    documents = make_documents(given, ranks)
    # Documents that fill micro-batches to the last token need some room to be dealt out evenly.
    room = given.tokens + given.length
    rule = StepRule(len(documents), False, 1, given.breadth_first, room, ranks.data, even)
    plan = plan_exactly(documents, rule, 0)
    objective = Objective(Grpo(0.2, 0.2), Denominator("labels"))
    runner = StepRunner(policy, objective, breadth_first=given.breadth_first)
    optimizer = make_adamw(policy.weights, AdamWOptions((0.9, 0.999), 1e-8, 0.0), kernels=kernels_serve(policy.weights))

    def step() -> None:
        runner.accumulate(plan)
        scale = clip_scale(gradient_norm(policy.weights), 1.0)
        if given.optimizer == "adamw":
            update(optimizer, policy.weights, 1e-6, scale)

    def timed() -> float:
        _wait(given)
        start = time.perf_counter()
        step()
        _wait(given)
        return time.perf_counter() - start

    step()
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    median = statistics.median([timed() for _ in range(given.steps + 1)][1:])
    if not ranks.first:
        return
    tokens = plan.totals.num_tokens
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}, {ranks.size} ranks")
    print(
        f"{tokens:,} tokens, {len(plan.micro_batches) // ranks.size} micro-batches a rank, {len(documents)} documents"
    )
    print(f"step {median:.3f} s   {tokens / median:,.0f} tokens/s   {tokens / median / ranks.size:,.0f} a rank")
    parts = arithmetic(policy, given, ranks)
    for name, size in parts.items():
        print(f"{name:45}{size:8.2f} GiB")
    print(f"{'sum':45}{sum(parts.values()):8.2f} GiB")
    if given.device == "cuda":
        left = torch.cuda.memory_allocated() - state_bytes(policy, optimizer)
        print(f"{'peak memory of this rank':45}{torch.cuda.max_memory_allocated() / GIB:8.2f} GiB")
        print(f"{'between steps, beside weights and their state':45}{left / GIB:8.2f} GiB", end="")
        print(f" (the whole embedding is {2 * policy.vocabulary_size * given.hidden / GIB:.2f})")


def state_bytes(policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """What this rank keeps between steps: its parts of weights, gradients and moments, and what it computes with."""
    weights = policy.weights
    kept = [*weights.master.values(), *weights.gradients.values(), *weights.frozen.values()]
    kept += [value for state in optimizer.state.values() for value in state.values() if value.is_cuda]
    kept += [parameter for parameter in policy.model.parameters() if not hasattr(parameter, "to_local")]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def _wait(given: argparse.Namespace) -> None:
    """Wait for this GPU and for the other ranks."""
    if given.device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
