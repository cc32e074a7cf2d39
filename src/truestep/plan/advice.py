"""Options and layouts that need less memory than a configuration does, and what each would save."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from truestep.config.schema import Config
from truestep.config.sections import AdamW8BitConfig
from truestep.errors import TruestepError
from truestep.plan.memory import has_reference, offloads_reference, plan_memory
from truestep.plan.shape import ModelShape
from truestep.policy.model.context import check_heads
from truestep.ranks.axes import RankLayout

_FEWEST_TOKENS = 1024  # of a micro-batch that is worth proposing
_SMALL_CHUNK = 1024


@dataclass(frozen=True)
class Saving:
    option: str  # as a user would write it
    saved: float  # bytes, of the rank that needs most


def layout_of(config: Config, size: int) -> RankLayout:
    """Lay out so many ranks as the configuration says."""
    names = RankLayout().by_name
    return RankLayout(**{name: getattr(config.parallel, name) for name in names}).over(size)


def most_of(config: Config, shape: ModelShape, layout: RankLayout) -> float:
    return max(rank.total for rank in plan_memory(config, shape, layout))


def savings(config: Config, shape: ModelShape, layout: RankLayout) -> list[Saving]:
    """Find the options that would lower the peak, the largest saving first."""
    before = most_of(config, shape, layout)
    found = [
        Saving(f"--{name} {str(value).lower()}", before - most_of(_with(config, name, value), shape, layout))
        for name, value in _proposals(config, layout)
    ]
    return sorted((saving for saving in found if saving.saved > 0.01 * before), key=lambda saving: -saving.saved)


def _proposals(config: Config, layout: RankLayout) -> Iterator[tuple[str, Any]]:
    sizes = layout.by_name
    if not config.model.activation_checkpointing:
        yield "model.activation_checkpointing", True
    if not config.model.compile:
        yield "model.compile", True
    if getattr(config.optimizer, "offload", "") == "none":
        yield "optimizer.offload", "states"
    if getattr(config.optimizer, "offload", "all") != "all":
        yield "optimizer.offload", "all"
    if has_reference(config) and not offloads_reference(config):
        yield "loss.kl_reference.offload", True
    if config.optimizer.type == "adamw":
        yield "optimizer.type", "adamw_8bit"
    if config.data.tokens_per_microbatch >= 2 * _FEWEST_TOKENS:
        yield "data.tokens_per_microbatch", config.data.tokens_per_microbatch // 2
    if sizes["data_shard"] * sizes["context"] > 1 and not config.parallel.reduce_each_micro_batch:
        yield "parallel.reduce_each_micro_batch", True
    if config.model.head.logits_chunk_size == "auto" or config.model.head.logits_chunk_size > _SMALL_CHUNK:
        yield "model.head.logits_chunk_size", _SMALL_CHUNK


def _with(config: Config, name: str, value: Any) -> Config:
    """Copy a configuration with one option changed; it was checked, and the change is one of ours."""
    if name == "optimizer.type":
        optimizer = AdamW8BitConfig.model_validate(config.optimizer.model_dump() | {"type": value})
        return config.model_copy(update={"optimizer": optimizer})
    first, *rest = name.split(".")
    if not rest:
        return config.model_copy(update={first: value})
    return config.model_copy(update={first: _with(getattr(config, first), ".".join(rest), value)})


def layouts_that_fit(config: Config, shape: ModelShape, size: int, room: float) -> list[tuple[RankLayout, float]]:
    """Find layouts of so many ranks whose largest rank has room, those that exchange least first."""
    found = []
    for tensor, context, pipeline in itertools.product(_divisors(size), repeat=3):
        if size % (tensor * context * pipeline):
            continue
        layout = RankLayout(tensor=tensor, context=context, pipeline=pipeline).over(size)
        if (most := _most_if_possible(config, shape, layout)) is not None and most <= room:
            found.append((layout, most))
    return sorted(found, key=lambda pair: _exchange(pair[0]))


def _divisors(size: int) -> Sequence[int]:
    return [number for number in range(1, size + 1) if size % number == 0]


def _exchange(layout: RankLayout) -> tuple[int, int, int]:
    """Order layouts by what they exchange within a layer; replicas and shards exchange once a layer."""
    sizes = layout.by_name
    return sizes["tensor"], sizes["context"], sizes["pipeline"]


def _most_if_possible(config: Config, shape: ModelShape, layout: RankLayout) -> float | None:
    sizes, text = layout.by_name, shape.config.get_text_config()
    if sizes["pipeline"] * config.parallel.stages_per_rank > len(shape.layer_names):
        return None
    try:
        Config.model_validate(
            config.model_dump(exclude_unset=True) | {"parallel": config.parallel.model_dump() | sizes}
        )
        check_heads(text.num_attention_heads, sizes["context"], sizes["tensor"])
        return most_of(config, shape, layout)
    except (TruestepError, ValidationError):  # the model's own plan refuses, or an option does
        return None
