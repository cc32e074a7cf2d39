"""The fastest layouts and options that fit so many GPUs, and what the options that say `auto` become."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.plan.advice import changed_plainly, layout_of, most_of
from truestep.plan.cards import CARDS, Card, card_here
from truestep.plan.memory import GIB, offloaded
from truestep.plan.shape import ModelShape, read_shape
from truestep.plan.time import RANKS_OF_A_HOST, StepTime, Work, plan_time
from truestep.policy.model.context import check_heads
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks

ROOM = 0.94  # of a card's memory that a plan may fill: the allocator holds a few percent more than the peak
CHECKPOINTING, OFFLOAD = "model.activation_checkpointing", "model.activation_offload"
REDUCE, OFFLOAD_ROOM = "parallel.reduce_each_micro_batch", "optimizer.offload_room"
_LARGEST = 8  # ranks of a dimension within a layer, and stages
_FEWEST_TOKENS = 1024
_MOST_LAYOUTS = 64


# What is changed, the configuration with it, and the memory of its rank that has most.
Way = tuple[dict[str, Any], Config, float]


@dataclass(frozen=True)
class Found:
    """A way to run a configuration: its layout, the options that are changed for it, and what it takes."""

    layout: RankLayout
    changes: Mapping[str, Any]
    memory: float
    time: StepTime

    def as_yaml(self) -> list[str]:
        """Write the options as lines of a configuration."""
        sections: dict[str, dict[str, Any]] = {}
        sizes = {name: size for name, size in self.layout.by_name.items() if size > 1}
        for name, value in {**{f"parallel.{name}": size for name, size in sizes.items()}, **self.changes}.items():
            section, _, option = name.partition(".")
            sections.setdefault(section, {})[option] = value
        return [f"{section}: {_flow(options)}" for section, options in sections.items()]


def _flow(options: Mapping[str, Any]) -> str:
    """Write a section on one line."""
    text: str = yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


def fastest(
    config: Config, shape: ModelShape, ranks: int, room: float, card: Card, length: float | None = None
) -> list[Found]:
    """Find what fits so many ranks with so much room each, the fastest first, one of each layout."""
    found = []
    for layout in _layouts(config, shape, ranks):
        sizes = layout.by_name
        work = Work.of(config, sizes["data_shard"] * sizes["data_replicate"], length)
        ways = (
            Found(layout, changes, memory, plan_time(changed, shape, layout, card, work))
            for changes, changed, memory in _that_fit(config, shape, layout, room, work.length)
        )
        best = min(ways, key=lambda way: way.time.total, default=None)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda way: -way.time.tokens_per_second)


def _layouts(config: Config, shape: ModelShape, ranks: int) -> Iterator[RankLayout]:
    """List the layouts that the options and the model allow."""
    sizes = [size for size in range(1, _LARGEST + 1) if ranks % size == 0]
    listed = 0
    for tensor in sizes:
        for context in sizes:
            for pipeline in sizes:
                together = tensor * context * pipeline
                if ranks % together or together > _LARGEST * 2:
                    continue
                for replicate in _replicas(ranks // together, ranks):
                    names = {"tensor": tensor, "context": context, "pipeline": pipeline, "data_replicate": replicate}
                    layout = RankLayout(**names).over(ranks)
                    if listed < _MOST_LAYOUTS and is_possible(config, shape, layout):
                        listed += 1
                        yield layout


def _replicas(data: int, ranks: int) -> list[int]:
    """List how many replicas are worth a look: none, one a rank, one a host."""
    hosts = ranks // RANKS_OF_A_HOST
    return sorted({1, data, *([hosts] if hosts > 1 and data % hosts == 0 else [])})


def is_possible(config: Config, shape: ModelShape, layout: RankLayout) -> bool:
    """Tell whether the model can be laid out so, and the options agree with it."""
    sizes, text = layout.by_name, shape.config.get_text_config()
    if sizes["pipeline"] * config.parallel.stages_per_rank > len(shape.layer_names):
        return False
    try:
        Config.model_validate(
            config.model_dump(exclude_unset=True) | {"parallel": config.parallel.model_dump() | sizes}
        )
        check_heads(text.num_attention_heads, sizes["context"], sizes["tensor"])
        shape.part(0, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
    except (TruestepError, ValidationError):  # the model's own plan refuses, or an option does
        return False
    return True


def _that_fit(config: Config, shape: ModelShape, layout: RankLayout, room: float, length: float) -> Iterator[Way]:
    """Try options that change no result, the fastest first; of each kind the first that fits."""
    sizes = layout.by_name
    tokens = config.data.tokens_per_microbatch
    # Where a step is so many micro-batches, their size is the step's.
    halved = config.schedule.docs_per_step > 0 and tokens // 2 >= max(_FEWEST_TOKENS, 2 * length)
    halves = [tokens // 2] if halved else []
    built_in = hasattr(config.optimizer, "offload")
    for micro_batch in (tokens, *halves):
        for place in ("none", "states", "all") if built_in else (None,):
            for reduce in (False, True) if sizes["data_shard"] * sizes["context"] > 1 else (False,):
                options: dict[str, Any] = {"data.tokens_per_microbatch": micro_batch, REDUCE: reduce}
                options |= {"optimizer.offload": place, OFFLOAD_ROOM: 0.0 if built_in else None}
                way = _first_that_fits(config, shape, layout, room, options)
                if way is not None:
                    yield _with_room(way, shape, layout, room)
                    if not reduce:
                        break


def _with_room(way: Way, shape: ModelShape, layout: RankLayout, room: float) -> Way:
    """Give what moves between host and device the memory that is left."""
    changes, config, memory = way
    if not offloaded(config):
        return way
    spare = float((room - memory) // GIB)
    roomy = changed_plainly(config, OFFLOAD_ROOM, spare)
    more = most_of(roomy, shape, layout)
    return ({**changes, OFFLOAD_ROOM: spare}, roomy, more) if more > memory else way


def _first_that_fits(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, options: Mapping[str, Any]
) -> Way | None:
    """Find the least recomputation with which a configuration fits."""
    given = {name: value for name, value in options.items() if value is not None}
    for how, on_host in ((False, False), ("selective", False), ("full", False), ("full", True)):
        every = given | {CHECKPOINTING: how, OFFLOAD: on_host}
        changed = config
        for name, value in every.items():
            changed = changed_plainly(changed, name, value)
        memory = most_of(changed, shape, layout)
        if memory <= room:
            return {name: value for name, value in every.items() if _differs(config, name, value)}, changed, memory
    return None


def _levels(config: Config, shape: ModelShape) -> tuple[Any, ...]:
    """List what may be recomputed, the least first. Elementwise recomputation keeps the scores of an attention that is
    made of products."""
    scores = (
        getattr(shape.config.get_text_config(), "attn_logit_softcapping", None) and config.model.attention != "flash"
    )
    return (False, "selective", "full") if scores else (False, "elementwise", "selective", "full")


def _differs(config: Config, name: str, value: Any) -> bool:
    before = _value(config, name)
    return bool((False if before == "auto" else before) != value)


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def settle(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, card: Card
) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto`: the fastest that fits, or where nothing fits what takes least. Give the
    configuration and those that were switched on."""
    auto = [name for name in (REDUCE, CHECKPOINTING, OFFLOAD) if _value(config, name) == "auto"]
    ways: list[tuple[bool, float, dict[str, Any], Config]] = []
    for changes in _choices(config, shape, auto):
        changed = config
        for name, value in changes.items():
            changed = changed_plainly(changed, name, value)
        memory = most_of(changed, shape, layout)
        fits = memory <= room
        ways.append((not fits, plan_time(changed, shape, layout, card).total if fits else memory, changes, changed))
    _, _, changes, changed = min(ways, key=lambda way: way[:2])  # of equals the first, which switches least on
    return changed, {name: value for name, value in changes.items() if value is not False}


def _choices(config: Config, shape: ModelShape, auto: list[str]) -> Iterator[dict[str, Any]]:
    for reduce in (False, True) if REDUCE in auto else (None,):
        for how in _levels(config, shape) if CHECKPOINTING in auto else (None,):
            for on_host in (False, True) if OFFLOAD in auto else (None,):
                changes = {REDUCE: reduce, CHECKPOINTING: how, OFFLOAD: on_host}
                given = {name: value for name, value in changes.items() if value is not None}
                recomputed = given.get(CHECKPOINTING, config.model.activation_checkpointing)
                if not (on_host and recomputed in (False, "elementwise")):
                    yield given


def settle_on(config: Config, ranks: Ranks) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto` for the GPUs that are here; every rank calls this."""
    asked = any(_value(config, name) == "auto" for name in (REDUCE, CHECKPOINTING, OFFLOAD))
    if not asked or config.model.device == "cpu" or not torch.cuda.is_available():
        return config, {}
    room = ROOM * min(ranks.gather(float(torch.cuda.mem_get_info()[1])))
    try:
        shape = read_shape(config)
    except TruestepError:  # a model that cannot be planned says so where it is loaded, or runs without
        return config, {}
    return settle(config, shape, layout_of(config, ranks.size), room, card_here() or CARDS["H100"])
