"""From options to parts. The one place that reads the configuration's values into the rooms that know no config."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from truestep.config.schema import Config
from truestep.config.sections import (
    CispoLoss,
    CrossEntropyLoss,
    DirectorySource,
    GrpoLoss,
    GspoLoss,
    RedisSource,
    ReinforceLoss,
)
from truestep.head.logits import HeadSettings
from truestep.losses.objective import Denominator, Objective
from truestep.losses.policy import Cispo, CrossEntropy, Grpo, Gspo, PolicyLoss, Reinforce, clip_bounds
from truestep.policy.loading.load import load_policy
from truestep.policy.policy import Policy
from truestep.ranks.axes import AXES, RankLayout
from truestep.ranks.group import Ranks, join
from truestep.rollouts.files import Documents, expand_paths, load_documents
from truestep.rollouts.record import Needs
from truestep.rollouts.shared import SharedSource
from truestep.rollouts.source import Source
from truestep.rollouts.stream.directory import DirectoryTransport
from truestep.rollouts.stream.intake import Checks
from truestep.rollouts.stream.source import StreamSource
from truestep.rollouts.stream.transport import Transport
from truestep.step.optimizer import LearningRate
from truestep.step.plan import StepRule
from truestep.step.run import StepRunner


def join_ranks(config: Config) -> Ranks:
    parallel = config.parallel
    layout = RankLayout(**{axis.name: getattr(parallel, axis.name) for axis in AXES})
    return join(layout, device=config.model.device, stall_timeout=config.schedule.stall_timeout)


def make_policy(config: Config, ranks: Ranks, path: str | None = None) -> Policy:
    model, head = config.model, config.model.head
    chunk = None if head.logits_chunk_size == "auto" else head.logits_chunk_size
    return load_policy(
        path or model.path,
        dtype=model.dtype,
        device=model.device,
        head=HeadSettings(fp32=head.fp32_lm_head, chunk_size=chunk, split_gradient=head.head_gradient == "split"),
        activation_checkpointing=model.activation_checkpointing,
        compiled=model.compile,
        trust_remote_code=model.trust_remote_code,
        longest_document=config.data.tokens_per_microbatch,
        ranks=ranks,
        reshard_after_forward=config.parallel.reshard_after_forward,
        reduce_each=config.parallel.reduce_each_micro_batch,
        stages_per_rank=config.parallel.stages_per_rank,
    )


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


def make_learning_rate(config: Config) -> LearningRate:
    optimizer = config.optimizer
    return LearningRate(
        optimizer.learning_rate,
        optimizer.schedule,
        optimizer.warmup_steps,
        optimizer.minimum_learning_rate,
        config.schedule.steps,
    )


def _needs(config: Config) -> Needs:
    supervised = config.loss.type == "cross_entropy"
    return Needs(logprobs=not supervised, advantages=not supervised, advantage_rule=config.data.advantages)


def own_part(config: Config) -> bool:
    """Whether each rank reads files of its own."""
    path = config.data.path
    return path is not None and any("{rank}" in pattern for pattern in ([path] if isinstance(path, str) else path))


def data_paths(config: Config, rank: int) -> list[Path]:
    path = config.data.path
    assert path is not None
    patterns = [path] if isinstance(path, str) else path
    return expand_paths([pattern.replace("{rank}", str(rank)) for pattern in patterns])


def read_documents(config: Config, vocabulary_size: int, rank: int = 0) -> Documents:
    data = config.data
    return load_documents(
        data_paths(config, rank),
        vocabulary_size=vocabulary_size,
        default_temperature=data.temperature,
        max_tokens=data.tokens_per_microbatch,
        needs=_needs(config),
        advantage_rule=data.advantages,
        group_size=data.group_size,
        on_bad_record=data.on_bad_record,
    )


def make_transport(source: RedisSource | DirectorySource) -> Transport:
    """An error now where the server or the directory is not there."""
    if isinstance(source, DirectorySource):
        return DirectoryTransport(Path(source.directory))
    from truestep.rollouts.stream.redis import RedisTransport  # an extra

    return RedisTransport(
        url=source.url, stream=source.stream, group=source.group, consumer=source.consumer, events=source.events
    )


def make_stream_source(config: Config, vocabulary_size: int, ranks: Ranks) -> Source:
    data = config.data
    assert data.source is not None
    checks = Checks(
        vocabulary_size=vocabulary_size,
        default_temperature=data.temperature,
        max_tokens=data.tokens_per_microbatch,
        needs=_needs(config),
        group_size=data.group_size,
        stop_at_rejected=data.on_bad_record == "stop",
    )
    if not ranks.first:
        return SharedSource(None, ranks)
    timeout = config.schedule.stall_timeout
    if ranks.size > 1:  # before the watch over the ranks ends the run, which cannot say what was waited for
        timeout -= min(5.0, 0.1 * timeout)
    source = StreamSource(make_transport(data.source), checks, timeout)
    return source if ranks.size == 1 else SharedSource(source, ranks)


def make_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
