"""What each difference in definition between other trainers' objectives and ours is worth, in numbers.

    python benchmarks/definitions.py

A step of 256 documents is drawn, in groups of 8: lengths, rewards, and the log-probs of a sampler, of the policy before
the step, of the policy now and of a reference. Then each trainer's formula, as plain torch operations on labels, stands
against the options of ours that are nearest. The number is ‖theirs - ours‖ / ‖ours‖ of the gradient in the log-probs of
all labels; where a difference is a factor, the factor. Printed as a table in Markdown for two steps: one of documents
that the policy has just written, and one of documents of some updates ago. No model and no GPU: a few seconds.

Dimensions: T labels of the step, D documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truestep.config.schema import Config
from truestep.losses.labels import Labels
from truestep.rollouts.fields import names_in_has
from truestep.run.assemble.step import make_objective
from truestep.types import StepTotals

GROUPS, GROUP, MICRO_BATCHES = 32, 8, 16


@dataclass(frozen=True)
class Step:
    document: Tensor  # [T] of which document a label is
    rewards: Tensor  # [D]
    sampler: Tensor  # [T] log-probs: of the sampler,
    old: Tensor  # [T] of the policy before the first update on these documents,
    now: Tensor  # [T] of the policy that is trained,
    reference: Tensor  # [T] and of a reference

    @property
    def lengths(self) -> Tensor:  # [D]
        return torch.bincount(self.document)

    @property
    def advantages(self) -> Tensor:  # [T]
        return self.normalized(self.rewards)[self.document]

    def normalized(self, rewards: Tensor, floor: float = 1e-4) -> Tensor:  # [D] -> [D]
        groups = rewards.view(GROUPS, GROUP)
        return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + floor)).flatten()

    def sums(self, values: Tensor) -> Tensor:  # [T] -> [D]
        return torch.zeros(len(self.rewards), dtype=torch.float64).index_add(0, self.document, values)


def draw(moved: float, noise: float, seed: int = 0) -> Step:
    """`moved`: how far a label's log-prob moves by the updates; `noise`: how far the sampler's is off."""
    generator = torch.Generator().manual_seed(seed)
    documents = GROUPS * GROUP
    lengths = (150 * torch.randn(documents, generator=generator).mul(0.7).exp()).long().clamp(4, 1500)
    document = torch.repeat_interleave(torch.arange(documents), lengths)

    def normal(size: float) -> Tensor:
        return size * torch.randn(len(document), generator=generator, dtype=torch.float64)

    # Half of the labels are all but certain, as in text; what is certain hardly moves.
    old = -torch.rand(len(document), generator=generator, dtype=torch.float64).pow(3) * 5
    loose = 1 - old.exp()
    return Step(
        document,
        (torch.rand(documents, generator=generator) < 0.4).double(),
        sampler=torch.clamp(old + loose * normal(noise), max=0),
        old=old,
        now=torch.clamp(old + loose * normal(moved), max=0),
        reference=torch.clamp(old + loose * normal(0.5), max=0),
    )


def ours(step: Step, loss: dict[str, Any], chosen: Tensor | None = None) -> Tensor:  # [T]
    """Compute the slope of the step's loss in each log-prob, by the code that trains."""
    objective = make_objective(Config.model_validate({"model": {"path": "none"}, "loss": {"type": "grpo"} | loss}))
    count, lengths = len(step.document), step.lengths
    totals = StepTotals(len(lengths), count, count)
    zeros, whole = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    there = torch.ones(len(lengths), dtype=torch.bool)
    labels = Labels(
        **dict.fromkeys(("temperature", "entropy", "logsumexp"), zeros),
        **dict.fromkeys(("rows", "ids", "model_version"), whole),
        document=step.document,
        num_labels=lengths,
        logprobs=step.now,
        old_logprobs=step.sampler,
        sampler_logprobs=step.sampler,
        recomputed_logprobs=step.old,
        reference_logprobs=step.reference,
        advantages=step.advantages,
        chosen=whole if chosen is None else chosen.long(),
        reward=step.rewards,
        rewards={},
        truncated=~there,
        has=dict.fromkeys((*names_in_has(), "recomputed_logprobs"), there),
        weight=objective.denominator.label_weights(lengths[step.document], totals),
    )
    return -objective.coefficients(objective.prepare(labels), totals).c


def slope_of(loss: Callable[[Tensor], Tensor], step: Step) -> Tensor:  # [T]
    """Differentiate a trainer's whole loss by autograd."""
    logprobs = step.now.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logprobs), logprobs)
    return found


def clipped(step: Step, low: float = 0.2, high: float = 0.2, **over: Tensor) -> Callable[[Tensor], Tensor]:
    """Give PPO's loss of each label."""
    old, advantages = over.get("old", step.old), over.get("advantages", step.advantages)

    def loss(logprobs: Tensor) -> Tensor:
        ratio = (logprobs - old).exp()
        return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)

    return loss


def k3(logprobs: Tensor, step: Step) -> Tensor:
    distance = step.reference - logprobs
    return distance.exp() - distance - 1


RECOMPUTED = {"old_logprobs": "recompute"}


def bnpo(step: Step) -> tuple[Tensor, Tensor]:
    part = step.document * MICRO_BATCHES // len(step.rewards)
    weights = 1 / (MICRO_BATCHES * torch.bincount(part).double())[part]
    return slope_of(lambda p: (clipped(step)(p) * weights).sum(), step), ours(step, RECOMPUTED)


def own_old(step: Step) -> tuple[Tensor, Tensor]:
    return slope_of(lambda p: clipped(step)(p).mean(), step), ours(step, {})


def sequence_mask(step: Step) -> tuple[Tensor, Tensor]:
    ratio = step.sums(step.old - step.sampler).exp()
    weights = torch.where(ratio > 3, 0, ratio)[step.document]
    return slope_of(lambda p: (clipped(step)(p) * weights).mean(), step), ours(step, RECOMPUTED)


def biased_kl(step: Step) -> tuple[Tensor, Tensor]:
    def loss(p: Tensor) -> Tensor:
        return (clipped(step)(p) + 0.04 * k3(p, step) * (p - step.old).exp()).mean()

    return slope_of(loss, step), ours(step, RECOMPUTED | {"kl_reference": {"weight": 0.04, "estimator": "k3"}})


def small_delta(step: Step) -> tuple[Tensor, Tensor]:
    advantages = step.advantages

    def loss(p: Tensor) -> Tensor:
        ratio = (p - step.old).exp()
        return -torch.minimum(ratio.clamp(max=1.1) * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    return slope_of(loss, step), ours(step, RECOMPUTED | {"dual_clip": 1.1})


def dual_clip(step: Step) -> tuple[Tensor, Tensor]:
    def loss(p: Tensor) -> Tensor:
        plain = clipped(step)(p)
        return torch.where(step.advantages < 0, torch.minimum(plain, -3 * step.advantages), plain).mean()

    return slope_of(loss, step), ours(step, RECOMPUTED)


def clamped_kl(step: Step) -> tuple[Tensor, Tensor]:
    def loss(p: Tensor) -> Tensor:
        return (clipped(step)(p) + 0.04 * k3(p, step).clamp(-10, 10)).mean()

    return slope_of(loss, step), ours(step, RECOMPUTED | {"kl_reference": {"weight": 0.04, "estimator": "k3"}})


def kl_in_reward(step: Step) -> tuple[Tensor, Tensor]:
    penalty = 0.001 * step.sums(step.old - step.reference)
    advantages = step.normalized(step.rewards - penalty, 1e-6)[step.document]
    theirs = slope_of(lambda p: clipped(step, advantages=advantages)(p).mean(), step)
    return theirs, ours(step, RECOMPUTED | {"kl_reference": {"weight": 0.001, "in": "reward"}})


def small_floor(step: Step) -> tuple[Tensor, Tensor]:
    advantages = step.normalized(step.rewards, 1e-6)[step.document]
    return slope_of(lambda p: clipped(step, advantages=advantages)(p).mean(), step), ours(step, RECOMPUTED)


def absolute_kl_cov(step: Step) -> tuple[Tensor, Tensor]:
    covariance = (step.old - step.old.mean()) * (step.advantages - step.advantages.mean())
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    chosen[covariance.argsort(descending=True)[: int(0.002 * len(covariance))]] = True

    def loss(p: Tensor) -> Tensor:
        log_ratio = p - step.old
        return (-log_ratio.exp() * step.advantages + torch.where(chosen, log_ratio.abs(), 0)).mean()

    options = {"epsilon_low": 1.0, "epsilon_high": 1e4, "kl_cov": {"share": 0.002, "weight": 1.0}}
    return slope_of(loss, step), ours(step, RECOMPUTED | options, chosen)


def kl_tau(step: Step) -> tuple[Tensor, Tensor]:
    def loss(p: Tensor) -> Tensor:
        moved, log_ratio = (p.exp() - step.sampler.exp()).detach(), p - step.sampler
        masked = torch.where(step.advantages > 0, moved > 0.2, moved < -0.2)
        return (torch.where(masked, 0, -log_ratio.exp() * step.advantages) + 0.001 * log_ratio.square()).mean()

    return slope_of(loss, step), ours(step, {"type": "dppo", "threshold": 0.2})


def default_kl(step: Step) -> tuple[Tensor, Tensor]:
    def loss(p: Tensor) -> Tensor:
        return (clipped(step, old=step.sampler)(p) + 0.1 * k3(p, step)).sum() / len(step.rewards)

    return slope_of(loss, step), ours(step, {"normalize_by": "documents"})


def opsm(step: Step) -> tuple[Tensor, Tensor]:
    drift = (step.sums(step.old - step.now) / step.lengths)[step.document]
    kept = ~((step.advantages < 0) & (drift > 0.01))
    theirs = slope_of(lambda p: (clipped(step)(p) * kept).mean(), step)
    return theirs, ours(step, RECOMPUTED | {"off_policy_mask": 0.01})


ROWS: tuple[tuple[str, str, Callable[[Step], tuple[Tensor, Tensor]]], ...] = (
    ("TRL `loss_type: bnpo`", f"the labels of a micro-batch ({MICRO_BATCHES} here) are N", bnpo),
    ("TRL, verl, slime: old log-probs", "the trainer's own: `old_logprobs: recompute`, against our default", own_old),
    ("TRL's default correction", "`sequence_mask` at 3 on top of that, against none", sequence_mask),
    ("TRL `beta: 0.04`, its default estimator", "k3 times ρ, against `estimator: k3`", biased_kl),
    ("TRL `delta: 1.1`", "below 1 + ε_high it caps positive advantages too", small_delta),
    ("verl `clip_ratio_c`", "3 where it is not given, against none", dual_clip),
    ("verl `low_var_kl`, 0.04", "clamped to ±10 after the exponential", clamped_kl),
    ("verl `use_kl_in_reward`, 0.001", "in the reward, before the group's mean and spread", kl_in_reward),
    ("verl's floor of the spread", "1e-6, against 1e-4", small_floor),
    ("verl `kl_cov`", "abs(log ρ), against ρ - log ρ - 1", absolute_kl_cov),
    ("prime-rl `kl_tau`", "0.001 (log ρ)² beside the loss", kl_tau),
    ("PipelineRL `kl_coef`", "0.1 where it is not given, against none", default_kl),
    ("slime `opsm_delta: 0.01`", "the drift since the trainer's own log-probs, against the sampler's", opsm),
)


def main() -> None:
    """Print the table."""
    steps = (draw(moved=0.0, noise=0.02), draw(moved=0.3, noise=0.05))
    print("| there | the difference | a first update | later updates |\n| --- | --- | --- | --- |")
    for name, difference, row in ROWS:
        values = []
        for step in steps:
            theirs, mine = row(step)
            values.append(float((theirs - mine).norm() / mine.norm()))
        shown = (f"{value:.2g}" if value > 1e-12 else "0" for value in values)  # below that it is rounding
        print(f"| {name} | {difference} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
