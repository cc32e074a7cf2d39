"""The whole configuration, and the options that are each valid and cannot hold together: one clear sentence each."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from truestep.config.losses import LossConfig, default_loss
from truestep.config.section import Section
from truestep.config.sections import (
    AdamWConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SamplerConfig,
    ScheduleConfig,
)


class Config(Section):
    model: ModelConfig
    """The policy."""
    loss: LossConfig = default_loss()
    """What is minimised; `type` picks the loss."""
    data: DataConfig = DataConfig()
    """Where documents come from and how they are packed."""
    sampler: SamplerConfig | None = None
    """Who writes rollouts; without it they are read from data.path or data.source."""
    evaluation: EvaluationConfig | None = None
    """Periodic evaluation on held-out prompts."""
    schedule: ScheduleConfig = ScheduleConfig()
    """What a step is."""
    parallel: ParallelConfig = ParallelConfig()
    """How a step is split over processes."""
    optimizer: OptimizerConfig = AdamWConfig()
    """How weights are updated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Where the run lives and what survives."""
    logging: LoggingConfig = LoggingConfig()
    """Where numbers go."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of sampling, shuffling and prompt order."""
    deterministic: bool = False
    """Refuse operations whose result differs from run to run; a resumed run is then bitwise the uninterrupted one."""

    @model_validator(mode="after")
    def _options_agree(self) -> Config:
        contradiction = next((message for rule in _RULES for message in [rule(self)] if message), None)
        if contradiction:
            raise ValueError(contradiction)
        return self


def _one_source(config: Config) -> str | None:
    if config.sampler is not None and config.data.path is not None:
        return "data.path and sampler are both given: documents come from one source; remove one of the two"
    return None


def _sent_documents(config: Config) -> str | None:
    data = config.data
    if data.source is None:
        return None
    if data.path is not None:
        return "data.source and data.path are both given: documents come from one source; remove one of the two"
    if config.sampler is not None:
        return "data.source and sampler are both given: documents come from one source; remove one of the two"
    if data.shuffle:
        return "data.shuffle is for the files of data.path; those of data.source are trained on in the order they come"
    if data.epochs != 1:
        return "data.epochs is for the files of data.path; the documents of data.source come once"
    if data.group_size is None and data.advantages != "none" and not config.loss.supervised:
        return (
            f"data.advantages: {data.advantages} needs data.group_size with data.source: how many rollouts make a "
            "group complete (or data.advantages: none, where records carry their own)"
        )
    return None


def _sampled_groups(config: Config) -> str | None:
    if config.sampler is None:
        return None
    group_size, docs_per_step = config.data.group_size, config.schedule.docs_per_step
    if config.loss.supervised:
        return f"loss.type: {config.loss.type} learns from given completions: it takes data.path, not a sampler"
    if group_size is None:
        return "sampler needs data.group_size: how many completions each prompt gets"
    if docs_per_step == 0:
        return "sampler needs schedule.docs_per_step: how many completions make a step"
    if docs_per_step % group_size:
        return (
            f"schedule.docs_per_step: {docs_per_step} is not a multiple of data.group_size: {group_size}, so a group "
            "would be cut in two"
        )
    if config.data.advantages == "none":
        return "data.advantages: none expects records that carry their advantage; a sampler gives rewards"
    if config.data.shuffle:
        return "data.shuffle is for files; a sampler's prompts are always taken in a seeded order"
    if config.data.epochs != 1:
        return "data.epochs is for files; with a sampler, schedule.steps says how long the run is"
    if config.schedule.steps is None:
        return "sampler needs schedule.steps: its prompts never end"
    if config.schedule.overshoot == "keep":
        return "schedule.overshoot: keep is for files; a sampler makes exactly schedule.docs_per_step documents"
    if config.schedule.last_step == "drop":
        return "schedule.last_step: drop is for files; a sampler's documents never end"
    if config.data.temperature != 1.0:
        return "data.temperature is for files; a sampler's is sampler.temperature"
    return None


def _servers(config: Config) -> str | None:
    if config.sampler is None or config.sampler.type != "server":
        return None
    urls = [url.rstrip("/") for url in config.sampler.urls]
    if len(set(urls)) < len(urls):
        return "sampler.urls names a server twice: its weights would be replaced under its own completions"
    return None


def _overshoot(config: Config) -> str | None:
    schedule = config.schedule
    if schedule.docs_per_step == 0 and schedule.overshoot == "keep":
        return "schedule.overshoot: keep needs schedule.docs_per_step > 0"
    if schedule.docs_per_step > 0 and schedule.depth_first_micro_batches > 1:
        return (
            "schedule.depth_first_micro_batches fixes the number of micro-batches and schedule.docs_per_step lets "
            "documents decide it: set one"
        )
    return None


def _learning_rate(config: Config) -> str | None:
    optimizer, steps = config.optimizer, config.schedule.steps
    if optimizer.schedule != "constant" and steps is None:
        return f"optimizer.schedule: {optimizer.schedule} needs schedule.steps: where the learning rate ends"
    if steps is not None and optimizer.warmup_steps > steps:
        return f"optimizer.warmup_steps: {optimizer.warmup_steps} is more than schedule.steps: {steps}"
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        return "optimizer.minimum_learning_rate is above optimizer.learning_rate"
    if optimizer.schedule == "constant" and optimizer.minimum_learning_rate > 0:
        return "optimizer.minimum_learning_rate does nothing with optimizer.schedule: constant"
    return None


def _evaluation(config: Config) -> str | None:
    if config.evaluation is not None and config.evaluation.reward is None and config.sampler is None:
        return "evaluation needs evaluation.reward: there is no sampler.reward to take"
    return None


def _padding(config: Config) -> str | None:
    data = config.data
    if data.tokens_per_microbatch % data.pad_to_multiple:
        return (
            f"data.tokens_per_microbatch: {data.tokens_per_microbatch} is not a multiple of data.pad_to_multiple: "
            f"{data.pad_to_multiple}, so padding could exceed the budget"
        )
    return None


def _split_models(config: Config) -> str | None:
    """Sampling and evaluation decode with whole layers; servers are given weights by a rank that has all of them."""
    parallel = config.parallel
    for name, ranks in (("tensor", parallel.tensor), ("pipeline", parallel.pipeline)):
        if ranks > 1 and config.sampler is not None:
            return (
                f"parallel.{name}: {ranks} leaves no rank a whole model to sample with or to give to servers: remove "
                f"sampler (and train on data.path or data.source), or set parallel.{name}: 1"
            )
        if ranks > 1 and config.evaluation is not None:
            return (
                f"parallel.{name}: {ranks} leaves no rank a whole model to generate with: remove evaluation, or set "
                f"parallel.{name}: 1"
            )
    return None


def _stages(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.stages_per_rank > 1 and parallel.pipeline == 1:
        return "parallel.stages_per_rank is of a pipeline: it needs parallel.pipeline > 1"
    return None


def _compiled(config: Config) -> str | None:
    if config.model.compile and config.parallel.tensor > 1:
        return (
            f"model.compile: layers that are cut over parallel.tensor: {config.parallel.tensor} ranks are not "
            "compiled; remove one of the two"
        )
    return None


_RULES = (
    _one_source,
    _sent_documents,
    _sampled_groups,
    _servers,
    _overshoot,
    _learning_rate,
    _evaluation,
    _padding,
    _split_models,
    _stages,
    _compiled,
)
