"""From options to what a step needs: its objective, its runner, its plans, the learning rate, the optimizer."""

from __future__ import annotations

import math

import torch

from truestep.config.schema import Config
from truestep.config.sections import CispoLoss, CrossEntropyLoss, GrpoLoss, GspoLoss, ReinforceLoss
from truestep.losses.objective import Denominator, Objective
from truestep.losses.policy import Cispo, CrossEntropy, Grpo, Gspo, PolicyLoss, Reinforce, clip_bounds
from truestep.policy.policy import Policy
from truestep.policy.weights.whole import Weights
from truestep.rollouts.source import Source
from truestep.step.optimizer import LearningRate, make_adamw
from truestep.step.plan import StepRule
from truestep.step.queue import PlanQueue
from truestep.step.run import StepRunner


def make_objective(config: Config) -> Objective:
    loss = config.loss
    return Objective(
        policy=_policy_loss(loss),
        denominator=Denominator(loss.normalize_by, loss.max_labels),
        entropy_bonus=loss.entropy_bonus,
        z_loss=loss.z_loss,
        deepspeed_divisor=loss.gradient_divisor == "deepspeed",
    )


def _policy_loss(loss: GrpoLoss | GspoLoss | ReinforceLoss | CispoLoss | CrossEntropyLoss) -> PolicyLoss:
    match loss:
        case GrpoLoss():
            return Grpo(clip_bounds(loss.epsilon_low, loss.epsilon_high), loss.dual_clip)
        case GspoLoss():
            return Gspo(clip_bounds(loss.epsilon_low, loss.epsilon_high), loss.dual_clip)
        case CispoLoss():
            return Cispo(clip_bounds(loss.epsilon_low, loss.epsilon_high))
        case ReinforceLoss():
            return Reinforce(math.inf if loss.ratio_cap is None else loss.ratio_cap)
        case CrossEntropyLoss():
            return CrossEntropy()


def make_runner(config: Config, policy: Policy) -> StepRunner:
    return StepRunner(
        policy,
        make_objective(config),
        config.loss.metrics,
        config.data.pad_to_multiple,
        config.schedule.breadth_first_micro_batches,
    )


def make_rule(config: Config, policy: Policy) -> StepRule:
    schedule = config.schedule
    return StepRule(
        docs_per_step=schedule.docs_per_step,
        keep_overshoot=schedule.overshoot == "keep",
        depth_first_micro_batches=schedule.depth_first_micro_batches,
        breadth_first_micro_batches=schedule.breadth_first_micro_batches,
        tokens_per_microbatch=config.data.tokens_per_microbatch,
        ranks=policy.weights.ranks.data,
        even_length=policy.facts.even_length,
    )


def make_queue(config: Config, policy: Policy, source: Source) -> PlanQueue:
    return PlanQueue(
        source,
        make_rule(config, policy),
        updates_per_batch=config.schedule.updates_per_batch,
        drop_last=config.schedule.last_step == "drop",
    )


def make_learning_rate(config: Config) -> LearningRate:
    optimizer = config.optimizer
    return LearningRate(
        optimizer.learning_rate,
        optimizer.schedule,
        optimizer.warmup_steps,
        optimizer.minimum_learning_rate,
        config.schedule.steps,
    )


def make_optimizer(config: Config, weights: Weights) -> torch.optim.Optimizer:
    optimizer = config.optimizer
    return make_adamw(
        weights,
        betas=(optimizer.beta1, optimizer.beta2),
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )
