"""Options that would lower a configuration's memory, and the bytes that each would save."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig
from truestep.plan.memory import has_reference, offloads_reference, plan_memory, recomputes, reduces_each
from truestep.plan.shape import ModelShape
from truestep.ranks.axes import RankLayout

FEWEST_TOKENS = 1024  # the smallest micro-batch to propose
_SMALL_CHUNK = 1024


@dataclass(frozen=True)
class Saving:
    option: str  # written as on the command line
    saved: float  # bytes, on the rank that needs the most memory
    config: Config  # the configuration with the option


def layout_of(config: Config, size: int) -> RankLayout:
    """Return the configuration's layout of `size` ranks."""
    names = RankLayout().every
    return RankLayout(**{name: getattr(config.parallel, name) for name in names}).over(size)


def most_of(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    return max(rank.total for rank in plan_memory(config, shape, layout))


def savings(config: Config, shape: ModelShape, layout: RankLayout) -> list[Saving]:
    """Find the options that would lower the peak, the largest saving first."""
    before = most_of(config, shape, layout)
    found = []
    for name, value in _proposals(config, layout):
        changed = changed_plainly(config, name, value)
        saved = before - most_of(changed, shape, layout)
        found.append(Saving(f"--{name} {str(value).lower()}", saved, changed))
    return sorted((saving for saving in found if saving.saved > 0.01 * before), key=lambda saving: -saving.saved)


def _proposals(config: Config, layout: RankLayout) -> Iterator[tuple[str, Any]]:
    sizes, how = layout.by_name, recomputes(config)
    if how == "none":
        yield "model.activation_checkpointing", "elementwise"
    if how in ("none", "elementwise"):
        yield "model.activation_checkpointing", "selective"
    if how != "full":
        yield "model.activation_checkpointing", "full"
    elif config.model.activation_offload is not True:
        yield "model.activation_offload", True
    if not config.model.compile:
        yield "model.compile", True
    if getattr(config.optimizer, "offload", "") == "none":
        yield "optimizer.offload", "states"
    if getattr(config.optimizer, "offload", "all") != "all":
        yield "optimizer.offload", "all"
    if getattr(config.optimizer, "offload_room", 0.0):
        yield "optimizer.offload_room", 0.0
    if has_reference(config) and not offloads_reference(config):
        yield "loss.kl_reference.offload", True
    if config.optimizer.type == "adamw":
        yield "optimizer.type", "adamw_8bit"
    if config.data.tokens_per_microbatch >= 2 * FEWEST_TOKENS:
        yield "data.tokens_per_microbatch", config.data.tokens_per_microbatch // 2
    if sizes["data_shard"] * sizes["context"] > 1 and not reduces_each(config):
        yield "parallel.reduce_each_micro_batch", True
    if config.model.head.logits_chunk_size == "auto" or config.model.head.logits_chunk_size > _SMALL_CHUNK:
        yield "model.head.logits_chunk_size", _SMALL_CHUNK


def changed_plainly(config: Config, name: str, value: Any) -> Config:
    """Copy a configuration with one option changed, without validating it again."""
    if name == "optimizer.type":
        optimizer = AdamW8BitConfig.model_validate(config.optimizer.model_dump() | {"type": value})
        return config.model_copy(update={"optimizer": optimizer})
    first, *rest = name.split(".")
    if not rest:
        return config.model_copy(update={first: value})
    return config.model_copy(update={first: changed_plainly(getattr(config, first), ".".join(rest), value)})
