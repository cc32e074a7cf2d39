"""Makes the parts of a step: objective, annotators, runner, plan queue, learning rate, optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from truestep.config.custom import load_custom
from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig, CustomOptimizer, MuonConfig
from truestep.losses.corrections import Correction, OffPolicyMask
from truestep.losses.exploration import ClipCov, EntropyTarget, KlCov
from truestep.losses.label_losses import make_label_loss
from truestep.losses.measure import Measure
from truestep.losses.objective import Denominator, Objective
from truestep.losses.reference import KlReference
from truestep.metrics.spent import Stopwatch
from truestep.model.experts.routing import ExpertSettings
from truestep.model.mixers.recurrence import cannot_share
from truestep.model.policy import Policy
from truestep.rollouts.fields import declare
from truestep.rollouts.source import Source
from truestep.step.before.annotators import Annotator, Annotators, ChosenLabels, OwnLogprobs, ReferenceLogprobs
from truestep.step.before.chosen import Chooser
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule
from truestep.step.plan.queue import PlanQueue
from truestep.step.plan.trees import Spread
from truestep.step.update.optimizer import (
    LearningRate,
    kernels_serve,
    load_optimizer,
    make_adamw,
    make_adamw_8bit,
    make_custom_optimizer,
    make_muon,
)
from truestep.step.update.optimizers.adamw import AdamWOptions
from truestep.step.update.optimizers.by_weight import Home
from truestep.step.update.optimizers.muon import MuonOptions
from truestep.types import ShareMode
from truestep.weights.errors import ModelError
from truestep.weights.finite import named_by_all
from truestep.weights.offloaded import HostCopies
from truestep.weights.protocol import Weights

# In nats, a mean over likely tokens. In float32 two engines differ by rounding only; bfloat16 has three digits.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
# Seconds to launch a layer with shared prefixes, forward and backward. False: layers are not compiled, measured with
# SmolLM2 on an H200 (4.5 ms without sharing). True: layers are compiled, an estimate.
_LAUNCH_SECONDS = {False: 6.5e-3, True: 2e-3}
_PRODUCTS_A_SECOND = 4e14  # FLOP/s of a large GPU's matrix products
FROM_RECORDS = "records"  # the value of loss.kl_reference.path for the reference_logprobs of the records


def make_objective(config: Config) -> Objective:
    loss = config.loss
    # A supervised loss has no policy loss to correct, and lacks these options.
    correction, threshold = getattr(loss, "correction", None), getattr(loss, "off_policy_mask", None)
    choice = _choice(config)
    return Objective(
        label_loss=make_label_loss(loss),
        denominator=Denominator(loss.normalize_by, loss.max_labels),
        entropy_bonus=loss.entropy_bonus,
        entropy_denominator=None if loss.entropy_normalize_by is None else Denominator(loss.entropy_normalize_by),
        z_loss=loss.z_loss,
        gradient_divisor=1.0 if loss.gradient_divisor == "none" else loss.gradient_divisor,
        correction=None if correction is None else Correction(**correction.model_dump()),
        off_policy_mask=None if threshold is None else OffPolicyMask(threshold),
        recompute=recomputes(config),
        kl_reference=_kl_reference(config),
        entropy_target=None if loss.entropy_target is None else EntropyTarget(**loss.entropy_target.model_dump()),
        clip_cov=choice if isinstance(choice, ClipCov) else None,
        kl_cov=choice if isinstance(choice, KlCov) else None,
        routers=expert_settings(config).has_terms,
    )


def expert_settings(config: Config) -> ExpertSettings:
    return ExpertSettings(**config.model.experts.model_dump())


def _choice(config: Config) -> ClipCov | KlCov | None:
    """Make the rule of loss.clip_cov or loss.kl_cov, if the loss has one."""
    clip, kl = (getattr(config.loss, name, None) for name in ("clip_cov", "kl_cov"))
    if clip is not None:
        return ClipCov(**clip.model_dump())
    return None if kl is None else KlCov(**kl.model_dump())


def recomputes(config: Config) -> bool:
    """Tell whether the trainer computes the old log-probs itself."""
    return getattr(config.loss, "old_logprobs", "sampler") == "recompute"


def needs_logprobs(config: Config) -> bool:
    """Tell whether the loss needs the sampler's log-probs."""
    loss = config.loss
    options = ("correction", "off_policy_mask", "clip_cov", "kl_cov")
    corrects = any(getattr(loss, name, None) is not None for name in options)
    return not loss.supervised and (corrects or not recomputes(config))


def takes_reference_of_records(config: Config) -> bool:
    options = getattr(config.loss, "kl_reference", None)
    return options is not None and options.path == FROM_RECORDS


def computes_reference(config: Config) -> bool:
    """Tell whether the trainer computes a reference's log-probs itself."""
    return getattr(config.loss, "kl_reference", None) is not None and not takes_reference_of_records(config)


def starts_from_first_weights(config: Config) -> bool:
    """Tell whether the run's first weights are the reference."""
    options = getattr(config.loss, "kl_reference", None)
    return options is not None and options.path is None


def _kl_reference(config: Config) -> KlReference | None:
    options = getattr(config.loss, "kl_reference", None)
    if options is None:
        return None
    in_reward = getattr(options, "in") == "reward"
    return KlReference(options.weight, options.estimator or ("k1" if in_reward else "k3"), in_reward)


def make_annotators(config: Config, runner: StepRunner, make_reference: Callable[[str | None], Policy]) -> Annotators:
    """Make the annotators, which add reference log-probs, own log-probs and chosen labels to a step's plan.
    `make_reference` loads the policy of `loss.kl_reference.path`."""
    reference = _reference_logprobs(config, runner, make_reference)
    return Annotators([*([] if reference is None else [reference]), *other_annotators(config)])


def other_annotators(config: Config) -> list[Annotator]:
    """Make all annotators except that of the reference."""
    annotators: list[Annotator] = []
    if recomputes(config) and config.schedule.updates_per_batch > 1:
        annotators.append(OwnLogprobs())
    if (rule := _choice(config)) is not None:
        annotators.append(ChosenLabels(Chooser(rule, config.seed)))
    return annotators


def _reference_logprobs(
    config: Config, runner: StepRunner, make_reference: Callable[[str | None], Policy]
) -> ReferenceLogprobs | None:
    options = getattr(config.loss, "kl_reference", None)
    if options is None or takes_reference_of_records(config):
        return None
    # With an adapter, the first weights are the base weights, which are loaded already.
    is_here = options.path is None and runner.policy.adapter is not None
    policy = runner.policy.without_adapter() if is_here else make_reference(options.path)
    if policy.vocabulary_size != runner.policy.vocabulary_size:
        raise ModelError(
            f"loss.kl_reference.path: {policy.path} has a vocabulary of {policy.vocabulary_size} tokens, and the "
            f"policy one of {runner.policy.vocabulary_size}: their log-probs cannot be compared"
        )
    # Timed apart from the step's passes, and not compared with the sampler's log-probs.
    reference = replace(runner, policy=policy, stopwatch=Stopwatch(policy.device), exact=False, compares=None)
    at_use: Callable[[], AbstractContextManager[None]] = nullcontext
    if options.offload:
        at_use = HostCopies(policy.weights).on_device
    return ReferenceLogprobs(reference, at_use)


def make_runner(config: Config, policy: Policy) -> StepRunner:
    return StepRunner(
        policy,
        make_objective(config),
        config.loss.metrics,
        config.data.pad_to_multiple,
        config.schedule.breadth_first_micro_batches,
        custom_metrics=load_metrics(config),
        skip_zero_advantage=config.data.zero_advantage == "skip",
        stopwatch=Stopwatch(policy.device),
        exact=getattr(config.sampler, "exact", False),
        compares=None if config.sampler is None else tolerance_of(config),
        fields=declare(config.data.model_dump()["fields"]),
    )


def tolerance_of(config: Config) -> float:
    """Return the allowed difference, in nats, between the sampler's and the trainer's log-probs."""
    return getattr(config.sampler, "tolerance", None) or _TOLERANCE[config.model.dtype]


def check_custom_code(config: Config) -> None:
    """Import the user's own code before the model is loaded, which can take minutes."""
    make_objective(config)
    load_metrics(config)
    for name in config.logging.custom_sinks or ():
        load_custom("logging.custom_sinks", name)
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
        skip_zero_advantage=config.data.zero_advantage == "skip",
        even_length=policy.facts.even_length,
        share=_share_mode(config, policy),
        busy=_busy_tokens(policy, bool(config.model.compile)),
        least_of_auto=least_saved(policy.device),
        alike=policy.token_fields,
    )


def least_saved(device: torch.device) -> int:
    """Return how many tokens a shared segment must save with `share_prefixes: auto`. A GPU's attention computes whole
    tiles, and a short segment fills only a small part of one."""
    return 64 if device.type == "cuda" else 16


def _busy_tokens(policy: Policy, compiled: bool) -> float:
    """Return the tokens of a micro-batch that a GPU computes while its host launches layers with shared prefixes."""
    if policy.device.type != "cuda":
        return 0.0
    layers = policy.model.config.get_text_config().num_hidden_layers
    products = 6 * policy.facts.weights / policy.weights.ranks.tensor
    return layers * _LAUNCH_SECONDS[compiled] * _PRODUCTS_A_SECOND / products


def _share_mode(config: Config, policy: Policy) -> ShareMode:
    """Return `data.share_prefixes`, or off where the model's layers, on any rank, cannot share a prefix."""
    mode = config.data.share_prefixes
    unable = [] if mode == "off" else named_by_all(policy.weights.ranks, cannot_share(policy.model))
    if unable and mode == "always":
        raise ModelError(
            f"data.share_prefixes: always is not possible with {type(policy.model).__name__}: the recurrence "
            f"registered for {unable[0]} does not name in `tokens` its arguments with a dimension of tokens. Set it to "
            "auto"
        )
    return "off" if unable else mode


def make_queue(config: Config, policy: Policy, source: Source) -> PlanQueue:
    ranks = policy.weights.ranks
    spread = Spread(ranks.data_rank, partial(ranks.gather_parts, ahead=True)) if ranks.data > 1 else None
    return PlanQueue(
        source,
        make_rule(config, policy),
        updates_per_batch=config.schedule.updates_per_batch,
        drop_last=config.schedule.last_step == "drop",
        spread=spread,
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
    optimizer, kernels = config.optimizer, False
    if not isinstance(optimizer, CustomOptimizer):
        kernels = kernels_serve(weights, eight_bits=isinstance(optimizer, AdamW8BitConfig))
    if not weights.master:  # this pipeline rank holds frozen weights only
        return torch.optim.SGD([{"params": []}], lr=0.0)
    if isinstance(optimizer, CustomOptimizer):
        return make_custom_optimizer(load_optimizer(optimizer.function, optimizer.options), weights)
    adamw = AdamWOptions((optimizer.beta1, optimizer.beta2), optimizer.epsilon, optimizer.weight_decay)
    home = Home(optimizer.offload != "none", round(optimizer.offload_room * 2**30))
    if isinstance(optimizer, MuonConfig):
        muon = MuonOptions(
            optimizer.momentum,
            optimizer.nesterov,
            optimizer.ns_steps,
            optimizer.adjust,
            optimizer.weight_decay,
            getattr(torch, optimizer.ns_dtype),
        )
        return make_muon(weights, muon, adamw, home, kernels=kernels)
    if isinstance(optimizer, AdamW8BitConfig):
        return make_adamw_8bit(weights, adamw, home, kernels=kernels)
    return make_adamw(weights, adamw, home, kernels=kernels)
