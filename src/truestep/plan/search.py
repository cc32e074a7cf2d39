"""The options that fit so many GPUs, and what the options that say `auto` become.

A fixed ladder of options, the fastest first; of each branch of it the first rung that fits:
1. what layers recompute: nothing, elementwise, selective (then with inputs on the host), full (then the same);
2. micro-batches as they are, then of half the tokens;
3. gradients reduced once a step, then after each micro-batch;
4. the optimizer's state on the device, on the host, and the float32 weights there too.
Planned times choose among the branches. Without rates the first rung of all is taken, and the fourth point counts most.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.gpu.memory import device_memory
from truestep.model.heads import HeadSizes
from truestep.model.mixers.context_parallel import check_heads
from truestep.plan.advice import FEWEST_TOKENS, changed_plainly, layout_of, most_of
from truestep.plan.cost import StepTime, Work, plan_time
from truestep.plan.memory import GIB, offloaded, reduces_each
from truestep.plan.rates import Rates
from truestep.plan.shape import ModelShape, read_shape
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import Ranks

ROOM = 0.94  # of a card's memory that a plan may fill: the allocator holds a few percent more than the peak
CHECKPOINTING, OFFLOAD = "model.activation_checkpointing", "model.activation_offload"
REDUCE, OFFLOAD_ROOM = "parallel.reduce_each_micro_batch", "optimizer.offload_room"
_TOKENS, _OPTIMIZER = "data.tokens_per_microbatch", "optimizer.offload"
_RUNGS = (
    (False, False),
    ("elementwise", False),
    ("selective", False),
    ("selective", True),
    ("full", False),
    ("full", True),
)
_LARGEST = 8  # ranks of a dimension within a layer, and stages
_RANKS_OF_A_HOST = 8
_MOST_LAYOUTS = 64


@dataclass(frozen=True)
class Way:
    """A way to run a configuration: its layout, the options that are changed for it, and what it takes."""

    layout: RankLayout
    changes: dict[str, Any]
    config: Config  # with the changes
    memory: float  # bytes of the rank that has most
    time: StepTime | None = None  # None without rates

    def as_yaml(self) -> list[str]:
        """Write the options as lines of a configuration."""
        sections: dict[str, dict[str, Any]] = {}
        sizes = {f"parallel.{name}": size for name, size in self.layout.by_name.items() if size > 1}
        for name, value in {**sizes, **self.changes}.items():
            section, _, option = name.partition(".")
            sections.setdefault(section, {})[option] = value
        return [f"{section}: {_flow(options)}" for section, options in sections.items()]


def _flow(options: Mapping[str, Any]) -> str:
    """Write a section on one line."""
    text: str = yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


def fastest(
    config: Config, shape: ModelShape, ranks: int, room: float, rates: Rates | None, length: float | None = None
) -> list[Way]:
    """Find what fits so many ranks with so much room each, one way of each layout: the fastest first. Without rates
    those first that exchange least within a layer."""
    found = []
    for layout in _layouts(config, shape, ranks):
        sizes = layout.by_name
        work = Work.of(config, sizes["data_shard"] * sizes["data_replicate"], length)
        options = _ladder(config, shape, layout, work.length)
        ways = (_with_room(way, shape, room) for way in _that_fit(config, shape, layout, room, options))
        if rates is not None:
            ways = (replace(way, time=plan_time(way.config, shape, layout, rates, work)) for way in ways)
        found += sorted(itertools.islice(ways, 1 if rates is None else None), key=_slowness)[:1]
    return sorted(found, key=_slowness)


def _slowness(way: Way) -> tuple[float, ...]:
    sizes = way.layout.by_name
    seconds = 0.0 if way.time is None else 1 / way.time.tokens_per_second
    return seconds, sizes["tensor"] * sizes["context"], sizes["pipeline"], sizes["data_replicate"]


def _layouts(config: Config, shape: ModelShape, ranks: int) -> Iterator[RankLayout]:
    """List the layouts that the options and the model allow."""
    sizes = [size for size in range(1, _LARGEST + 1) if ranks % size == 0]
    listed = 0
    for tensor, context, pipeline in product(sizes, sizes, sizes):
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
    hosts = ranks // _RANKS_OF_A_HOST
    return sorted({1, data, *([hosts] if hosts > 1 and data % hosts == 0 else [])})


def is_possible(config: Config, shape: ModelShape, layout: RankLayout) -> bool:
    """Tell whether the model can be laid out so, and the options agree with it."""
    sizes = layout.by_name
    if sizes["pipeline"] * config.parallel.stages_per_rank > len(shape.layer_names):
        return False
    try:
        Config.model_validate(
            config.model_dump(exclude_unset=True) | {"parallel": config.parallel.model_dump() | sizes}
        )
        check_heads(HeadSizes.of(shape.config).queries, sizes["context"], sizes["tensor"])
        shape.part(0, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
    except (TruestepError, ValidationError):  # the model's own plan refuses, or an option does
        return False
    return True


def _ladder(config: Config, shape: ModelShape, layout: RankLayout, length: float) -> list[dict[str, Any]]:
    """List the options that change no result, the fastest first."""
    tokens = config.data.tokens_per_microbatch
    # Where a step is so many micro-batches, their size is the step's.
    halved = config.schedule.docs_per_step > 0 and tokens // 2 >= max(FEWEST_TOKENS, 2 * length)
    sizes = (tokens, tokens // 2) if halved else (tokens,)
    places = ("none", "states", "all") if hasattr(config.optimizer, "offload") else (None,)
    found = []
    for place, (how, on_host), size, reduce in product(places, _rungs(config, shape), sizes, _reductions(layout)):
        options = {CHECKPOINTING: how, OFFLOAD: on_host, _TOKENS: size, REDUCE: reduce}
        found.append(options | ({} if place is None else {_OPTIMIZER: place, OFFLOAD_ROOM: 0.0}))
    return found


def _rungs(config: Config, shape: ModelShape) -> list[tuple[Any, bool]]:
    """List what may be recomputed, the least first. Elementwise recomputation keeps the scores of an attention that is
    made of products."""
    softcap = getattr(shape.config.get_text_config(), "attn_logit_softcapping", None)
    scores = softcap and config.model.attention != "flash"
    return [rung for rung in _RUNGS if not (scores and rung[0] == "elementwise")]


def _reductions(layout: RankLayout) -> tuple[bool, ...]:
    return (False, True) if layout.by_name["data_shard"] * layout.by_name["context"] > 1 else (False,)


def _that_fit(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, ladder: Iterable[dict[str, Any]]
) -> Iterator[Way]:
    """Climb the ladder: of all options that differ in their recomputation alone the first that fits."""
    done = []
    for options in ladder:
        branch = {name: value for name, value in options.items() if name not in (CHECKPOINTING, OFFLOAD)}
        if branch not in done:
            way = _way(config, shape, layout, options)
            if way.memory <= room:
                done.append(branch)
                yield way


def _way(config: Config, shape: ModelShape, layout: RankLayout, options: Mapping[str, Any]) -> Way:
    changed = config
    for name, value in options.items():
        changed = changed_plainly(changed, name, value)
    changes = {name: value for name, value in options.items() if _differs(config, name, value)}
    return Way(layout, changes, changed, most_of(changed, shape, layout))


def _with_room(way: Way, shape: ModelShape, room: float) -> Way:
    """Give what moves between host and device the memory that is left."""
    if not offloaded(way.config):
        return way
    spare = {OFFLOAD_ROOM: float((room - way.memory) // GIB)}
    roomy = _way(way.config, shape, way.layout, spare)
    return replace(roomy, changes=way.changes | spare) if roomy.memory > way.memory else way


def _differs(config: Config, name: str, value: Any) -> bool:
    before = _value(config, name)
    return bool((False if before == "auto" else before) != value)


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def settle(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, rates: Rates | None
) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto`: the first rung that fits, or where nothing fits what takes least. Planned
    times choose between gradients that are reduced each time and those that are not; without rates the lower rung
    does. Give the configuration and those that were switched on."""
    auto = [name for name in (CHECKPOINTING, OFFLOAD, REDUCE) if _value(config, name) == "auto"]
    given = (_value(config, CHECKPOINTING), _value(config, OFFLOAD))
    # An option that says `auto` may have any value, another one has its own.
    rungs = [
        (how, host)
        for how, host in _rungs(config, shape)
        if (CHECKPOINTING in auto or how == given[0]) and (OFFLOAD in auto or host == given[1])
    ]
    every = [
        dict(zip((CHECKPOINTING, OFFLOAD, REDUCE), (*rung, reduce), strict=True))
        for rung, reduce in product(rungs or [given], _reductions(layout))
    ]
    ladder = [{name: options[name] for name in auto} for options in every]
    fitting = list(_that_fit(config, shape, layout, room, ladder))
    if not fitting:
        best = min((_way(config, shape, layout, options) for options in ladder), key=lambda way: way.memory)
    elif rates is None:
        best = fitting[0]
    else:  # of equals the one that is not reduced each time
        fitting.sort(key=lambda way: reduces_each(way.config))
        best = min(fitting, key=lambda way: plan_time(way.config, shape, layout, rates).total)
    return best.config, best.changes


def settle_on(config: Config, ranks: Ranks, rates: Rates | None) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto` for the GPUs that are here; every rank calls this with the same rates."""
    asked = any(_value(config, name) == "auto" for name in (REDUCE, CHECKPOINTING, OFFLOAD))
    if not asked or config.model.device == "cpu" or not torch.cuda.is_available():
        return config, {}
    room = ROOM * min(ranks.gather(float(device_memory())))
    try:
        shape = read_shape(config)
    except TruestepError:  # a model that cannot be planned says so where it is loaded, or runs without
        return config, {}
    return settle(config, shape, layout_of(config, ranks.size), room, rates)
