"""Makes the parts of a step: its objective, its runner, its plans, the learning rate, the optimizer."""

import torch

from truestep.config.schema import Config
from truestep.config.sections import CustomOptimizer
from truestep.custom import load_custom
from truestep.losses.corrections import Correction, OffPolicyMask
from truestep.losses.label_losses import make_label_loss
from truestep.losses.measure import Measure
from truestep.losses.objective import Denominator, Objective
from truestep.policy.policy import Policy
from truestep.policy.weights.protocol import Weights
from truestep.rollouts.source import Source
from truestep.step.optimizer import LearningRate, load_optimizer, make_adamw, make_custom_optimizer
from truestep.step.plan import StepRule
from truestep.step.queue import PlanQueue
from truestep.step.runner import StepRunner


def make_objective(config: Config) -> Objective:
    loss = config.loss
    # A supervised loss has no policy loss that could be corrected, and no such options.
    correction, threshold = getattr(loss, "correction", None), getattr(loss, "off_policy_mask", None)
    return Objective(
        label_loss=make_label_loss(loss),
        denominator=Denominator(loss.normalize_by, loss.max_labels),
        entropy_bonus=loss.entropy_bonus,
        z_loss=loss.z_loss,
        gradient_divisor=1.0 if loss.gradient_divisor == "none" else loss.gradient_divisor,
        correction=None if correction is None else Correction(**correction.model_dump()),
        off_policy_mask=None if threshold is None else OffPolicyMask(threshold),
    )


def make_runner(config: Config, policy: Policy) -> StepRunner:
    return StepRunner(
        policy,
        make_objective(config),
        config.loss.metrics,
        config.data.pad_to_multiple,
        config.schedule.breadth_first_micro_batches,
        custom_metrics=load_metrics(config),
    )


def check_custom_code(config: Config) -> None:
    """Import the user's own code before the model is loaded, which can take minutes."""
    make_objective(config)
    load_metrics(config)
    if isinstance(config.optimizer, CustomOptimizer):
        load_optimizer(config.optimizer.function, config.optimizer.options)


def load_metrics(config: Config) -> dict[str, Measure]:
    """Import the user's own metrics, by their import paths."""
    return {name: load_custom("logging.custom_metrics", name) for name in config.logging.custom_metrics or ()}


def make_rule(config: Config, policy: Policy) -> StepRule:
    schedule = config.schedule
    return StepRule(
        docs_per_step=schedule.docs_per_step,
        keep_overshoot=schedule.overshoot == "keep",
        depth_first_micro_batches=schedule.depth_first_micro_batches,
        breadth_first_micro_batches=schedule.breadth_first_micro_batches,
        tokens_per_microbatch=config.data.tokens_per_microbatch,
        ranks=policy.weights.ranks.data,
        advantage_std_floor=config.data.advantage_std_floor,
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
    if isinstance(optimizer, CustomOptimizer):
        return make_custom_optimizer(load_optimizer(optimizer.function, optimizer.options), weights)
    return make_adamw(
        weights,
        betas=(optimizer.beta1, optimizer.beta2),
        epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
    )
