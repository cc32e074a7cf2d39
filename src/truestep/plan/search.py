"""Searches for options and layouts that fit a number of GPUs, and chooses the values of options that say `auto`.

The search tries combinations of these options, each listed from fastest to slowest:
1. recomputation: none, elementwise, selective, selective with inputs on the host, full, full with inputs on the host;
2. micro-batches of the given size, then of half the tokens;
3. gradients reduced once per step, then after each micro-batch;
4. the optimizer's state on the device, then on the host, then the float32 weights on the host too.
For each combination of 2 to 4, the first recomputation that fits is taken. Planned times choose among these. Without
rates, the first combination that fits is taken; option 4 varies slowest.
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

ROOM = 0.94  # fraction of a card's memory that a plan may fill: the allocator reserves a few percent above the peak
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
_LARGEST = 8  # the most tensor ranks, context ranks and pipeline stages
_RANKS_OF_A_HOST = 8
_MOST_LAYOUTS = 64


@dataclass(frozen=True)
class Way:
    """A way to run a configuration: a layout, changed options, and their memory and time."""

    layout: RankLayout
    changes: dict[str, Any]
    config: Config  # with the changes
    memory: float  # bytes, of the rank that needs most
    time: StepTime | None = None  # None without rates

    def as_yaml(self) -> list[str]:
        """Return the layout and the changed options as lines of YAML."""
        sections: dict[str, dict[str, Any]] = {}
        sizes = {f"parallel.{name}": size for name, size in self.layout.by_name.items() if size > 1}
        for name, value in {**sizes, **self.changes}.items():
            section, _, option = name.partition(".")
            sections.setdefault(section, {})[option] = value
        return [f"{section}: {_flow(options)}" for section, options in sections.items()]


def _flow(options: Mapping[str, Any]) -> str:
    """Return a section as one line of YAML."""
    text: str = yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


def fastest(
    config: Config, shape: ModelShape, ranks: int, room: float, rates: Rates | None, length: float | None = None
) -> list[Way]:
    """Find the fastest way of each layout that fits `room` bytes per rank, the fastest layout first. Without rates, the
    layouts with the least communication within a layer come first."""
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
    """Yield the layouts that the options and the model allow."""
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
    """Return the numbers of replicas to try: one, one per data rank, one per host."""
    hosts = ranks // _RANKS_OF_A_HOST
    return sorted({1, data, *([hosts] if hosts > 1 and data % hosts == 0 else [])})


def is_possible(config: Config, shape: ModelShape, layout: RankLayout) -> bool:
    """Tell whether the model and the options allow a layout."""
    sizes = layout.by_name
    if sizes["pipeline"] * config.parallel.stages_per_rank > len(shape.layer_names):
        return False
    try:
        Config.model_validate(
            config.model_dump(exclude_unset=True) | {"parallel": config.parallel.model_dump() | sizes}
        )
        check_heads(HeadSizes.of(shape.config).queries, sizes["context"], sizes["tensor"])
        shape.part(0, sizes["pipeline"], config.parallel.stages_per_rank, sizes["tensor"])
    except (TruestepError, ValidationError):  # the model cannot be cut this way, or an option conflicts
        return False
    return True


def _ladder(config: Config, shape: ModelShape, layout: RankLayout, length: float) -> list[dict[str, Any]]:
    """List combinations of options that do not change the results, the fastest first."""
    tokens = config.data.tokens_per_microbatch
    # If a step is a fixed number of micro-batches, halving them would halve the step: then keep the size.
    halved = config.schedule.docs_per_step > 0 and tokens // 2 >= max(FEWEST_TOKENS, 2 * length)
    sizes = (tokens, tokens // 2) if halved else (tokens,)
    places = ("none", "states", "all") if hasattr(config.optimizer, "offload") else (None,)
    found = []
    for place, (how, on_host), size, reduce in product(places, _rungs(config, shape), sizes, _reductions(layout)):
        options = {CHECKPOINTING: how, OFFLOAD: on_host, _TOKENS: size, REDUCE: reduce}
        found.append(options | ({} if place is None else {_OPTIMIZER: place, OFFLOAD_ROOM: 0.0}))
    return found


def _rungs(config: Config, shape: ModelShape) -> list[tuple[Any, bool]]:
    """List the kinds of recomputation, the least first. Elementwise is left out if attention with a softcap is computed
    from matrix products, because it would keep all scores."""
    softcap = getattr(shape.config.get_text_config(), "attn_logit_softcapping", None)
    scores = softcap and config.model.attention != "flash"
    return [rung for rung in _RUNGS if not (scores and rung[0] == "elementwise")]


def _reductions(layout: RankLayout) -> tuple[bool, ...]:
    return (False, True) if layout.by_name["data_shard"] * layout.by_name["context"] > 1 else (False,)


def _that_fit(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, ladder: Iterable[dict[str, Any]]
) -> Iterator[Way]:
    """Yield the first way that fits, for each set of options that differ only in their recomputation."""
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
    """Set `optimizer.offload_room` to the memory that is left, in whole GiB."""
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
    """Choose values for the options that say `auto`: the least recomputation that fits, or the smallest memory if
    nothing fits. Planned times choose whether gradients are reduced after each micro-batch; without rates, the first
    combination that fits is taken. Return the configuration and the options that were switched on."""
    auto = [name for name in (CHECKPOINTING, OFFLOAD, REDUCE) if _value(config, name) == "auto"]
    given = (_value(config, CHECKPOINTING), _value(config, OFFLOAD))
    # Only options that say `auto` may change.
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
    else:  # at equal times, prefer one reduction per step
        fitting.sort(key=lambda way: reduces_each(way.config))
        best = min(fitting, key=lambda way: plan_time(way.config, shape, layout, rates).total)
    return best.config, best.changes


def settle_on(config: Config, ranks: Ranks, rates: Rates | None) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto` for this machine's GPUs. Every rank calls this with the same rates."""
    asked = any(_value(config, name) == "auto" for name in (REDUCE, CHECKPOINTING, OFFLOAD))
    if not asked or config.model.device == "cpu" or not torch.cuda.is_available():
        return config, {}
    room = ROOM * min(ranks.gather(float(device_memory())))
    try:
        shape = read_shape(config)
    except TruestepError:  # loading the model shows the error, or the run needs no plan
        return config, {}
    return settle(config, shape, layout_of(config, ranks.size), room, rates)
