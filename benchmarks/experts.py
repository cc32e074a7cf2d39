"""One training step of a mixture of experts: tokens a second, and how far from the bound of active products.

    python benchmarks/experts.py
    torchrun --nproc-per-node 2 benchmarks/experts.py --expert 1 2 --activation-checkpointing full

Six layers of Qwen3-30B-A3B's shape (128 experts, 8 active), random weights, documents of about 1k tokens of which half
are labels, GRPO, bfloat16 compute, a float32 head, compiled layers. Our experts and transformers' own (`grouped_mm`)
train the same documents in one run. The bound counts matrix products alone: 6 · active weights · tokens, 6 · head ·
labels, and attention's over the pairs that a causal document has, at the matrix rate of the same run.

With torchrun, weights are sharded over all ranks (FSDP), and for each number of `--expert` the experts are divided over
so many of them, in the same processes. `--tokens` are those of each rank. Figures are a GPU's; the memory is that of
the rank that has most; the share is of `--peak`, and counts active products once, whatever is computed again.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import transformers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from step import document
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import ALONE, Ranks, join, leave, world_size
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import kernels_serve, make_adamw_8bit, prepare, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.types import Rollout, StepPlan

OURS, THEIRS = "ours", "transformers"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (
        ("layers", 6), ("hidden", 2048), ("intermediate", 768), ("experts", 128), ("chosen", 8), ("heads", 32),
        ("keys", 4), ("vocabulary", 151_936), ("tokens", 65_536), ("micro-batch", 16_384), ("length", 1000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--steps", type=int, default=5, help="timed, after two that are not")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--plain", action="store_true", help="do not compile layers")
    parser.add_argument("--activation-checkpointing", choices=["full", "selective", "elementwise"], default=False)
    parser.add_argument("--expert", type=int, nargs="+", default=[1], help="expert ranks, for each a measurement")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the card in bfloat16")
    parser.add_argument("--only", choices=[OURS, THEIRS], help="one of the two")
    parser.add_argument("--profile", type=int, metavar="N", default=0, help="name the N kernels that take longest")
    return parser.parse_args()


def write_model(directory: Path, given: argparse.Namespace) -> None:
    config = Qwen3MoeConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        moe_intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.keys,
        head_dim=128,
        num_experts=given.experts,
        num_experts_per_tok=given.chosen,
        norm_topk_prob=True,
        max_position_embeddings=32_768,
        initializer_range=getattr(given, "scale", 0.02),
    )
    with torch.device(given.device):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def make_documents(given: argparse.Namespace) -> list[Rollout]:
    generator = np.random.default_rng(0)
    documents, left = [], given.tokens * world_size() * 97 // 100
    while left > 200:
        length = min(int(generator.integers(given.length * 6 // 10, given.length * 14 // 10)), left)
        left -= length
        ids = generator.integers(0, given.vocabulary, length)
        documents.append(document(str(len(documents)), ids, length - length // 2, generator))
    return documents


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], object], device: str) -> float:
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def matrix_rate(device: str) -> float:
    """FLOP/s of a large product in this run."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [timed(lambda: a @ b, device) for _ in range(15)]
    return 2 * size**3 / statistics.median(times[5:])


def bound(policy: Policy, plan: StepPlan, rate: float) -> float:
    pairs = sum(document.num_tokens**2 / 2 for document in plan.documents)
    products = (
        6 * policy.facts.weights * plan.totals.num_tokens + 6 * policy.facts.head_weights * plan.totals.num_labels
    )
    return (products + 12 * policy.facts.attention * pairs) / rate / plan.ranks


@contextmanager
def experts_of(who: str) -> Iterator[None]:
    """Leave transformers' experts in the models that are loaded inside, if they are asked for."""
    with nullcontext() if who == OURS else patch("truestep.model.loading.load.group_experts"):
        yield


def measure(
    who: str, path: Path, documents: list[Rollout], rate: float, given: argparse.Namespace, ranks: Ranks = ALONE
) -> None:
    torch._dynamo.reset()
    with experts_of(who):
        policy = load_policy(
            path,
            dtype="bfloat16" if given.device == "cuda" else "float32",
            device=given.device,
            head=HeadSettings(fp32=True),
            activation_checkpointing=given.activation_checkpointing,
            compiled=not given.plain,
            ranks=ranks,
        )
    plan = plan_exactly(documents, StepRule(len(documents), False, 1, 1, given.micro_batch, ranks.data), 0)
    runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")))
    kernels = kernels_serve(policy.weights, eight_bits=True)
    optimizer = make_adamw_8bit(policy.weights, AdamWOptions((0.9, 0.999), 1e-8, 0.0), kernels=kernels)

    def step() -> None:
        runner.accumulate(plan)
        norm = gradient_norm(policy.weights, meanwhile=partial(prepare, optimizer))
        update(optimizer, policy.weights, 1e-6, clip_scale(norm, 1.0))

    step()
    step()
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    median = statistics.median(timed(step, given.device) for _ in range(given.steps))
    passes = statistics.median(timed(lambda: runner.accumulate(plan), given.device) for _ in range(3))
    least, tokens = bound(policy, plan, rate), plan.totals.num_tokens / plan.ranks
    peak = max(ranks.gather(torch.cuda.max_memory_allocated() / 2**30 if given.device == "cuda" else 0.0))
    if not ranks.first:
        return
    name = f"expert {ranks.expert}" if ranks.size > 1 else who
    share = least / median * rate / (given.peak * 1e12)
    print(
        f"{name:13} {tokens / median:10,.0f} tokens/s {share:6.1%} of the card's peak {peak:6.1f} GiB"
        f"   step {median:7.3f} s {median / least:5.2f} x bound"
        f"   forward+backward {passes:7.3f} s {passes / least:5.2f} x bound"
    )
    if given.profile:
        from step import profile

        profile(step, given.profile)


def over_ranks(documents: list[Rollout], rate: float, given: argparse.Namespace) -> None:
    """Measure each number of expert ranks, in the same processes."""
    alone = join(RankLayout(), device=given.device, stall_timeout=600)
    directory = Path(alone.share(tempfile.mkdtemp))
    try:
        alone.share(lambda: write_model(directory, given))
        for many in given.expert:
            gc.collect()
            if given.device == "cuda":
                torch.cuda.empty_cache()
            ranks = join(RankLayout(expert=many), device=given.device, stall_timeout=600)
            measure(OURS, directory, documents, rate, given, ranks)
    finally:
        alone.gather(None)  # a barrier
        alone.share(lambda: shutil.rmtree(directory, ignore_errors=True))
        leave()


def main() -> None:
    given = options()
    if given.device == "cuda" and world_size() > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rate = matrix_rate(given.device)
    documents = make_documents(given)
    tokens, labels = (sum(getattr(each, name) for each in documents) for name in ("num_tokens", "num_labels"))
    if os.environ.get("RANK", "0") == "0":
        print(f"torch {torch.__version__}, transformers {transformers.__version__}, {rate / 1e12:.2f} TFLOP/s")
        print(f"{given.layers} layers, {tokens:,} tokens, {labels:,} labels, {len(documents)} documents")
    if world_size() > 1:
        over_ranks(documents, rate, given)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), given)
        for who in (OURS, THEIRS) if given.only is None else (given.only,):
            measure(who, Path(directory), documents, rate, given)
            if given.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
