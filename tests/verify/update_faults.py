"""Faults of updates, schedules, clipping and advantages, planted in the ranks that `verify` starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from truestep.step import learner
from truestep.step.compute.runner import StepRunner
from truestep.step.update import gradient_clipping as clipping
from truestep.step.update.optimizer import LearningRate
from truestep.step.update.optimizers.by_weight import ByWeight
from truestep.tools.verify.reduced import VOCABULARY
from truestep.weights import whole
from verify.other_faults import (
    a_step_too_few,
    advantages_times,
    codes_beside_their_block,
    eight_bits_with,
    moved_by_one,
    muon_with,
    not_orthogonal,
    population_deviation,
    rounded_down,
    rule,
    scales_times,
    signs_lost_in_packing,
    size_of_one,
    turns_that_stand_still,
    with_rule,
    without_the_last,
)

# --- the learning rate


def rate(change: Callable[[LearningRate, int, Any], float]) -> None:
    honest = LearningRate.at
    LearningRate.at = lambda self, step: change(self, step, honest)  # type: ignore[method-assign]


def times(factor: float, self: LearningRate, step: int, honest: Any) -> float:
    return float(factor * honest(self, step))


def shifted(by: int, self: LearningRate, step: int, honest: Any) -> float:
    return float(honest(self, max(1, step + by)))


def changed(options: dict[str, Any], self: LearningRate, step: int, honest: Any) -> float:
    return float(honest(dataclasses.replace(self, **options), step))


def warm_up_to_the_step_behind(self: LearningRate, step: int, honest: Any) -> float:
    return self.peak * step / (self.warmup_steps + 1) if step <= self.warmup_steps else float(honest(self, step))


def decay_that_warm_up_is_part_of(self: LearningRate, step: int, honest: Any) -> float:
    if step <= self.warmup_steps:
        return float(honest(self, step))
    return float(honest(dataclasses.replace(self, warmup_steps=0), step))


def applied_rate(factor: float) -> None:
    """The schedule is right, and the optimizer is given another rate."""
    honest = learner.update
    learner.update = lambda optimizer, weights, rate, scale=1.0: honest(optimizer, weights, factor * rate, scale)


def rate_of_the_first_step_for_ever() -> None:
    honest, first = learner.update, list[float]()

    def update(optimizer: Any, weights: Any, rate: float, scale: float = 1.0) -> None:
        first.append(rate)
        honest(optimizer, weights, first[0], scale)

    learner.update = update


# --- clipping


def scale_of(change: Callable[[float, float | None], float]) -> None:
    learner.clip_scale = change


def unclipped(norm: float, threshold: float | None) -> float:
    return 1.0


def always_to_the_threshold(norm: float, threshold: float | None) -> float:
    return (threshold or norm) / norm


def by_the_square(norm: float, threshold: float | None) -> float:
    return clipping.clip_scale(norm**2, threshold)


def threshold_doubled(norm: float, threshold: float | None) -> float:
    return clipping.clip_scale(norm, None if threshold is None else 2 * threshold)


def by_what_is_above(norm: float, threshold: float | None) -> float:
    return 1.0 if threshold is None or norm <= threshold else (threshold / norm) ** 0.5


def clip_by_value() -> None:
    honest = learner.update

    def update(optimizer: Any, weights: Any, rate: float, scale: float = 1.0) -> None:
        for gradient in weights.gradients.values():
            gradient.clamp_(-0.01, 0.01)
        honest(optimizer, weights, rate, 1.0)

    learner.update = update


def clip_each_weight() -> None:
    honest = learner.update

    def update(optimizer: Any, weights: Any, rate: float, scale: float = 1.0) -> None:
        for gradient in weights.gradients.values():
            gradient.mul_(min(1.0, 0.1 / float(gradient.norm().clamp(min=1e-30))))
        honest(optimizer, weights, rate, 1.0)

    learner.update = update


def scale_that_the_optimizer_forgets() -> None:
    honest = ByWeight.step
    ByWeight.step = lambda self, closure=None, *, scale=1.0: honest(self, closure)  # type: ignore[method-assign, assignment, misc]


def norm_of_each_rank() -> None:
    clipping.WEIGHT_PARTS = ()


def norm_of_matrices() -> None:
    honest = clipping._norm

    def norm(weights: Any, gradients: Any, *rest: Any) -> float:
        return honest(weights, {name: each for name, each in gradients.items() if len(each) > 32}, *rest)

    clipping._norm = norm


# --- what torch's fused AdamW is given


def fused(change: Callable[..., None]) -> None:
    honest = torch._fused_adamw_

    def wrapped(weights: Any, gradients: Any, first: Any, second: Any, _: Any, numbers: Any, **named: Any) -> None:
        change(
            lambda numbers=numbers, **over: honest(weights, gradients, first, second, [], numbers, **(named | over)),
            Given(weights, gradients, first, second, numbers, named),
        )

    torch._fused_adamw_ = wrapped  # type: ignore[assignment]


class Given(NamedTuple):
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    first: list[torch.Tensor]
    second: list[torch.Tensor]
    numbers: list[torch.Tensor]
    named: dict[str, Any]


def with_options(options: dict[str, Any], honest: Any, given: Given) -> None:
    honest(**options)


def betas_swapped(honest: Any, given: Given) -> None:
    honest(beta1=given.named["beta2"], beta2=given.named["beta1"])


def decay_without_the_rate(honest: Any, given: Given) -> None:
    honest(weight_decay=1e-4 * given.named["weight_decay"] / given.named["lr"])


def decay_times(factor: float, honest: Any, given: Given) -> None:
    honest(weight_decay=factor * given.named["weight_decay"])


def vectors_decayed(honest: Any, given: Given) -> None:
    honest(weight_decay=0.1)


def embedding_not_decayed(honest: Any, given: Given) -> None:
    ends = given.weights[0].shape[0] == VOCABULARY
    honest(weight_decay=0.0 if ends else given.named["weight_decay"])


def decay_in_the_gradient(honest: Any, given: Given) -> None:
    """L2 regularisation, which Adam then scales."""
    for weight, gradient in zip(given.weights, given.gradients, strict=True):
        gradient.add_(weight, alpha=given.named["weight_decay"])
    honest(weight_decay=0.0)


def numbers_of(change: Callable[[torch.Tensor], torch.Tensor], honest: Any, given: Given) -> None:
    honest(numbers=[change(number) for number in given.numbers])


def next_number(number: torch.Tensor) -> torch.Tensor:
    return number + 1


def first_number(number: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(number)


def endless_number(number: torch.Tensor) -> torch.Tensor:
    return torch.full_like(number, 1e6)


def by_hand(first_correction: bool, second_correction: bool, inside: bool, honest: Any, given: Given) -> None:
    named, number = given.named, float(given.numbers[0])
    for weight, gradient, first, second in zip(*given[:4], strict=True):
        first.lerp_(gradient, 1 - named["beta1"])
        second.mul_(named["beta2"]).addcmul_(gradient, gradient, value=1 - named["beta2"])
        root = second / (1 - named["beta2"] ** number) if second_correction else second
        divisor = (root + named["eps"]).sqrt() if inside else root.sqrt() + named["eps"]
        weight.mul_(1 - named["lr"] * named["weight_decay"])
        weight.addcdiv_(first, divisor, value=-named["lr"] / (1 - named["beta1"] ** number if first_correction else 1))


def moments_in_bfloat16(honest: Any, given: Given) -> None:
    honest()
    for moment in (*given.first, *given.second):
        moment.copy_(moment.bfloat16())


def weights_in_bfloat16(honest: Any, given: Given) -> None:
    honest()
    for weight in given.weights:
        weight.copy_(weight.bfloat16())


def upwards(honest: Any, given: Given) -> None:
    honest(maximize=True)


def signs_turned(honest: Any, given: Given) -> None:
    before = [weight.clone() for weight in given.weights]
    honest()
    for weight, old in zip(given.weights, before, strict=True):
        weight.copy_(2 * old - weight)


def vectors_at(factor: float, honest: Any, given: Given) -> None:
    honest(lr=given.named["lr"] * (factor if given.weights[0].ndim == 1 else 1.0))


def head_left_out(honest: Any, given: Given) -> None:
    if given.weights[0].shape[0] != VOCABULARY:
        honest()


def last_row_left_out(honest: Any, given: Given) -> None:
    last = [weight[-1:].clone() for weight in given.weights]
    honest()
    for weight, old in zip(given.weights, last, strict=True):
        weight[-1:] = old


def only_signs(honest: Any, given: Given) -> None:
    """Second moments are those of this update alone."""
    honest(beta2=0.0)


# --- the update as a whole


def updated(times: int) -> None:
    honest = learner.update

    def update(*arguments: Any) -> None:
        for _ in range(times):
            honest(*arguments)

    learner.update = update


def stale_gradients() -> None:
    """The optimizer takes the gradient of the step before."""
    honest, old = learner.update, dict[str, torch.Tensor]()

    def update(optimizer: Any, weights: Any, *rest: Any) -> None:
        for name, gradient in weights.gradients.items():
            new = gradient.clone()
            gradient.copy_(old.get(name, new))
            old[name] = new
        honest(optimizer, weights, *rest)

    learner.update = update


def frozen_weights_decay() -> None:
    honest = learner.update

    def update(optimizer: Any, weights: Any, rate: float, scale: float = 1.0) -> None:
        honest(optimizer, weights, rate, scale)
        for weight in weights.frozen.values():
            with torch.no_grad():
                weight.mul_(1 - 10 * rate)

    learner.update = update


def loaded_in_bfloat16() -> None:
    honest = whole.WholeWeights.__init__

    def rounding(self: Any, *arguments: Any, **named: Any) -> None:
        honest(self, *arguments, **named)
        for weight in self.master.values():
            weight.data.copy_(weight.data.bfloat16())

    whole.WholeWeights.__init__ = rounding  # type: ignore[method-assign]


def moments_that_begin_anew() -> None:
    honest = ByWeight.prepare

    def prepare(self: Any) -> None:
        self.state.clear()
        honest(self)

    ByWeight.prepare = prepare  # type: ignore[method-assign]


# --- gradients


def gradient_times(factor: float) -> None:
    honest = StepRunner._head

    def scaled(self: Any, *arguments: Any) -> Any:
        statistics, gradient = honest(self, *arguments)
        return statistics, gradient * factor

    StepRunner._head = scaled  # type: ignore[method-assign]
    honest_norm = learner.gradient_norm

    def norm(weights: Any, *rest: Any) -> float:
        for gradient in weights.gradients.values():
            gradient.mul_(factor)
        return honest_norm(weights, *rest)

    StepRunner._head = honest  # type: ignore[method-assign]
    learner.gradient_norm = norm


def divided_by_ranks() -> None:
    honest = learner.gradient_norm

    def norm(weights: Any, *rest: Any) -> float:
        for gradient in weights.gradients.values():
            gradient.div_(weights.ranks.size)
        return honest(weights, *rest)

    learner.gradient_norm = norm


# --- the table


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is planted, and the line that must name it: the kind that it begins with, and words in it."""

    name: str
    plant: Callable[[], None]
    kind: str
    words: str
    over: dict[str, Any] = dataclasses.field(default_factory=dict)
    layout: str = "one process"


COSINE = {"optimizer": {"schedule": "cosine"}}
EIGHT_BITS: dict[str, Any] = {"optimizer": {"type": "adamw_8bit"}}
MUON: dict[str, Any] = {"optimizer": {"type": "muon"}}
STEP = {"data": {"advantages": "batch_normalized"}}
PENALTY = {"data": {"overlong_penalty": {"from": 2, "to": 5, "weight": 0.5}}}


def _fused(name: str, change: Callable[..., None], kind: str, words: str, **options: Any) -> Fault:
    return Fault(name, partial(fused, change), kind, words, **options)


FAULTS = (
    Fault("rate 10% low", partial(rate, partial(times, 0.9)), "learning rate", "of step"),
    Fault("rate times 3", partial(rate, partial(times, 3.0)), "learning rate", "of step"),
    Fault("no warm-up", partial(rate, partial(changed, {"warmup_steps": 0})), "learning rate", "of step"),
    Fault("warm-up a step late", partial(rate, partial(shifted, -1)), "learning rate", "of step"),
    Fault("warm-up a step early", partial(rate, partial(shifted, 1)), "learning rate", "of step"),
    Fault("warm-up to the step behind", partial(rate, warm_up_to_the_step_behind), "learning rate", "of step"),
    Fault(
        "no decay of the rate", partial(rate, partial(changed, {"schedule": "constant"})), "learning rate", "of step"
    ),
    Fault("least rate ignored", partial(rate, partial(changed, {"minimum": 0.0})), "learning rate", "of step"),
    Fault("decay counts warm-up", partial(rate, decay_that_warm_up_is_part_of), "learning rate", "of step"),
    Fault(
        "linear for cosine", partial(rate, partial(changed, {"schedule": "linear"})), "learning rate", "of step", COSINE
    ),
    Fault("applied rate 10% low", partial(applied_rate, 0.9), "learning rate", "of every weight"),
    Fault("rate of the first step", rate_of_the_first_step_for_ever, "learning rate", "of every weight"),
    Fault("no clipping", partial(scale_of, unclipped), "clipping", "multiplied by 1, not by"),
    Fault("scaled up to the threshold", partial(scale_of, always_to_the_threshold), "clipping", "multiplied by"),
    Fault("clipped by the squared norm", partial(scale_of, by_the_square), "clipping", "multiplied by"),
    Fault("threshold doubled", partial(scale_of, threshold_doubled), "clipping", "multiplied by"),
    Fault("root of the scale", partial(scale_of, by_what_is_above), "clipping", "multiplied by"),
    Fault("clipped by value", clip_by_value, "taken gradient", "is not the step's"),
    Fault("each weight clipped", clip_each_weight, "clipping", "multiplied by"),
    Fault("scale forgotten", scale_that_the_optimizer_forgets, "clipping", "did not reach the moments"),
    Fault("norm of each rank", norm_of_each_rank, "clipping", "multiplied by", layout="FSDP 2"),
    Fault("norm of matrices", norm_of_matrices, "clipping", "multiplied by"),
    _fused("no weight decay", partial(with_options, {"weight_decay": 0.0}), "weight decay", "not 0.1"),
    _fused("norms decayed", vectors_decayed, "weight decay", "norm"),
    _fused("weight decay without the rate", decay_without_the_rate, "weight decay", "not 0.1"),
    _fused("weight decay doubled", partial(decay_times, 2.0), "weight decay", "not 0.1"),
    _fused("embedding not decayed", embedding_not_decayed, "weight decay", "embed_tokens"),
    _fused("decay in the gradient", decay_in_the_gradient, "moment", "exp_avg"),
    _fused("betas swapped", betas_swapped, "moment", "exp_avg"),
    _fused("beta1 0.95", partial(with_options, {"beta1": 0.95}), "moment", "exp_avg is 0.5 times"),
    _fused("beta2 0.99", partial(with_options, {"beta2": 0.99}), "moment", "exp_avg_sq is 10 times"),
    _fused("second moment of one update", only_signs, "moment", "exp_avg_sq"),
    Fault("moments begin anew", moments_that_begin_anew, "moment", "exp_avg"),
    _fused("moments in bfloat16", moments_in_bfloat16, "moment", "rounded to bfloat16"),
    _fused("weights in bfloat16", weights_in_bfloat16, "precision", "of the weights is that of bfloat16"),
    Fault("weights loaded in bfloat16", loaded_in_bfloat16, "first weights", "not those of the model's files"),
    _fused("no bias correction", partial(numbers_of, endless_number), "bias correction", "is left out"),
    _fused("first moment's bias", partial(by_hand, False, True, False), "bias correction", "of the first moment"),
    _fused("second moment's bias", partial(by_hand, True, False, False), "bias correction", "of the second moment"),
    _fused("bias of the next update", partial(numbers_of, next_number), "bias correction", "of the next update"),
    _fused("bias of the first update", partial(numbers_of, first_number), "bias correction", "of the update before"),
    _fused("epsilon in the root", partial(by_hand, True, True, True), "epsilon", "within the root"),
    _fused("no epsilon", partial(with_options, {"eps": 1e-20}), "epsilon", "is left out"),
    _fused("epsilon 1e-5", partial(with_options, {"eps": 1e-5}), "epsilon", "is 1e-05"),
    _fused("gradient ascent", upwards, "taken gradient", "of the moments is -1 times"),
    _fused("signs of updates", signs_turned, "update", "-1 times"),
    _fused("norms at half the rate", partial(vectors_at, 0.5), "update", "times what moments and rate give"),
    _fused("head left out", head_left_out, "update", "numbers as they were"),
    _fused("last row left out", last_row_left_out, "update", "numbers as they were"),
    Fault("updated twice", partial(updated, 2), "update", "2 times in this step"),
    Fault("not updated", partial(updated, 0), "update", "0 times in this step"),
    Fault("stale gradients", stale_gradients, "taken gradient", "is not the step's"),
    Fault(
        "frozen weights decay",
        frozen_weights_decay,
        "frozen",
        "embed_tokens",
        {"freeze": ["*embed_tokens*"]},
    ),
    Fault("gradient doubled", partial(gradient_times, 2.0), "gradient", "is 2 times"),
    Fault("gradient of the wrong sign", partial(gradient_times, -1.0), "gradient", "is -1 times"),
    Fault("gradient divided by ranks", divided_by_ranks, "gradient", "is 0.5 times", layout="FSDP 2"),
    Fault("advantages of the wrong sign", partial(rule, partial(advantages_times, -1.0)), "advantage", "of document"),
    Fault("advantages doubled", partial(rule, partial(advantages_times, 2.0)), "advantage", "of document"),
    Fault("deviation by n", partial(rule, population_deviation), "advantage", "of document"),
    Fault("a group ends early", partial(rule, without_the_last), "advantage", "of document"),
    Fault("advantages of the next", partial(rule, moved_by_one), "advantage", "of document"),
    Fault("scale over the step", partial(rule, partial(with_rule, {"scale": "step"})), "advantage", "of document"),
    Fault(
        "scale over the group", partial(rule, partial(with_rule, {"scale": "group"})), "advantage", "of document", STEP
    ),
    Fault("no scale", partial(rule, partial(with_rule, {"scale": "none"})), "advantage", "of document"),
    Fault("others' mean", partial(rule, partial(with_rule, {"baseline": "leave_one_out"})), "advantage", "of document"),
    Fault("another floor", partial(rule, partial(with_rule, {"floor": 1e-2})), "advantage", "of document"),
    Fault("no penalty", partial(rule, partial(with_rule, {"penalty": None})), "advantage", "of document", PENALTY),
    Fault("signs lost in packing", signs_lost_in_packing, "metric", "advantage"),
    Fault("8 bits: scales 2% high", partial(scales_times, 1.02), "moment", "exp_avg", EIGHT_BITS),
    Fault("8 bits: rounded down", rounded_down, "moment", "exp_avg", EIGHT_BITS),
    Fault("8 bits: turns stand still", turns_that_stand_still, "moment", "exp_avg", EIGHT_BITS),
    Fault("8 bits: scales of other blocks", codes_beside_their_block, "moment", "exp_avg", EIGHT_BITS),
    Fault("8 bits: no decay", partial(eight_bits_with, weight_decay=0.0), "weight decay", "not 0.1", EIGHT_BITS),
    Fault("8 bits: betas", partial(eight_bits_with, betas=(0.95, 0.999)), "moment", "exp_avg is", EIGHT_BITS),
    Fault("muon: not orthogonal", not_orthogonal, "update", "no multiple", MUON),
    Fault("muon: a step too few", a_step_too_few, "update", "no multiple", MUON),
    Fault("muon: another size", size_of_one, "update", "times what moments and rate give", MUON),
    Fault("muon: momentum", partial(muon_with, momentum=0.9), "moment", "momentum_buffer is 2 times", MUON),
    Fault("muon: no nesterov", partial(muon_with, nesterov=False), "update", "no multiple", MUON),
    Fault("muon: no decay", partial(muon_with, weight_decay=0.0), "weight decay", "not 0.1", MUON),
)
