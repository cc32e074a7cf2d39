"""The cost of comparing a sampler's log-probs with the policy's, in one call: steps with and without, by turns.

    python benchmarks/check.py [--layers 28 --hidden 1024 --documents 256 --length 1000 --cpu]

A random model of Qwen3's shape, GRPO, packed documents of which half are labels, and AdamW's update. The documents come
with the log-probs of the model itself, as an honest sampler's do. A third kind of step scores a share of completions
that arrive, as `sampler.max_staleness` above 0 does.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from qwen import write_model

from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.step.before.agreement import Judge
from truestep.step.before.check import SamplerCheck
from truestep.step.before.scoring import score_documents, with_logprobs
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import clip_scale, gradient_norm
from truestep.step.update.optimizer import kernels_serve, make_adamw, prepare, update
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.types import Rollout


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--untied", action="store_true", help="the head is not the embedding")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a document")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=9, help="of each kind")
    parser.add_argument("--share", type=float, default=0.002, help="sampler.check_share")
    parser.add_argument("--metrics", choices=["none", "basic", "full"], default="basic", help="loss.metrics")
    parser.add_argument("--cpu", action="store_true", help="float32 on the processor")
    return parser.parse_args()


def make_documents(given: argparse.Namespace) -> list[Rollout]:
    generator = np.random.default_rng(0)
    documents = []
    for number in range(given.documents):
        mask = np.arange(given.length) >= given.length // 2
        documents.append(
            Rollout(
                id=str(number),
                input_ids=generator.integers(0, given.vocabulary, given.length),
                loss_mask=mask,
                logprobs=np.zeros(given.length, np.float32),
                advantages=np.where(mask, generator.normal(), 0).astype(np.float32),
                model_version=np.zeros(given.length, np.int64),
                group_id=str(number // 8),
                metadata={"server": "http://a"},
            )
        )
    return documents


def main() -> None:
    given = options()
    device, dtype = ("cpu", "float32") if given.cpu else ("cuda", "bfloat16")
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), given, device=device)
        policy = load_policy(Path(directory), dtype=dtype, device=device, head=HeadSettings(fp32=True))
    rule, tolerance = StepRule(given.documents, False, 1, 1, given.tokens), 1e-3 if given.cpu else 0.1
    plain = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")), given.metrics)
    plan = plan_exactly(make_documents(given), rule, 0)
    known = with_logprobs(plan.documents, "recomputed_logprobs", score_documents(plain, plan))
    honest = [replace(one, logprobs=one.recomputed_logprobs, recomputed_logprobs=None) for one in known]
    plan = plan_exactly(honest, rule, 0)
    arrived = honest[: max(1, round(given.share * len(honest)))]
    weights = policy.weights
    kernels = kernels_serve(weights, eight_bits=False)
    optimizer = make_adamw(weights, AdamWOptions((0.9, 0.999), 1e-8, 0.0), kernels=kernels)
    compared = replace(plain, compares=tolerance)
    judge = Judge(tolerance, policy.vocabulary_size, draws=False)  # random ids are no draws of the model
    checks = {"without": None, "with": SamplerCheck(compared, rule, judge)}
    checks["with, and completions that arrive"] = SamplerCheck(compared, rule, judge, arrived=lambda: arrived)

    def step(check: SamplerCheck | None) -> float:
        wait = (lambda: None) if given.cpu else torch.cuda.synchronize
        wait()
        start = time.perf_counter()
        accumulated = (plain if check is None else compared).accumulate(plan)
        if check is not None and (fault := check.before_update(plan, accumulated)):
            raise SystemExit(fault)
        norm = gradient_norm(weights, meanwhile=partial(prepare, optimizer))
        update(optimizer, weights, 0.0, clip_scale(norm, 1.0))  # at a rate of 0, so that documents stay honest
        wait()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in checks}
    for turn in range(given.steps + 1):
        names = list(checks) if turn % 2 else list(checks)[::-1]
        for name in names:
            spent = step(checks[name])
            if turn:  # the first compiles and allocates
                times[name].append(spent)
    print(f"torch {torch.__version__}, {'CPU' if given.cpu else torch.cuda.get_device_name()}, {dtype}")
    print(
        f"{plan.totals.num_tokens:,} tokens, {plan.totals.num_labels:,} labels, {len(plan.micro_batches)} micro-batches"
    )
    base = statistics.median(times["without"])
    for name, spent in times.items():
        pairs = [one / other - 1 for one, other in zip(spent, times["without"], strict=True)]
        print(
            f"{name:36} {statistics.median(spent):8.4f} s  least {min(spent):8.4f} s  "
            f"{statistics.median(spent) / base - 1:+.2%} of medians, {statistics.median(pairs):+.2%} turn by turn"
        )


if __name__ == "__main__":
    main()
