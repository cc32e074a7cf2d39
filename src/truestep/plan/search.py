"""Searches for options that fit a GPU, and chooses the values of options that say `auto`.

The search tries combinations of these options, each listed from fastest to slowest:
1. recomputation: none, elementwise, selective, selective with inputs on the host, full, full with inputs on the host;
2. micro-batches of the given size, then of half the tokens;
3. gradients reduced once per step, then after each micro-batch;
4. the optimizer's state on the device, then on the host, then the float32 weights on the host too.

Option 4 varies slowest. The first combination that fits is taken. For `auto`, option 3 is chosen by planned times.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import yaml

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.gpu.memory import device_memory
from truestep.plan.advice import FEWEST_TOKENS, changed_plainly, layout_of, most_of
from truestep.plan.cost import Hosts, plan_time
from truestep.plan.memory import reduces_each
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


@dataclass(frozen=True)
class Way:
    """A way to run a configuration: changed options, and their memory."""

    changes: dict[str, Any]
    config: Config  # the configuration with these changes
    memory: float  # bytes, on the rank that needs the most memory

    def as_yaml(self) -> list[str]:
        """Return the changed options as lines of YAML."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in self.changes.items():
            section, _, option = name.partition(".")
            sections.setdefault(section, {})[option] = value
        return [f"{section}: {_flow(options)}" for section, options in sections.items()]


def _flow(options: Mapping[str, Any]) -> str:
    """Return a section as one line of YAML."""
    text: str = yaml.safe_dump(dict(options), default_flow_style=True, sort_keys=False, width=1000)
    return text.strip()


def first_that_fits(config: Config, shape: ModelShape, layout: RankLayout, room: float) -> Way | None:
    """Find the first of the listed combinations that fits `room` bytes per rank."""
    return next(_that_fit(config, shape, layout, room, _ladder(config, shape, layout)), None)


def _ladder(config: Config, shape: ModelShape, layout: RankLayout) -> list[dict[str, Any]]:
    """List combinations of options that do not change the results, the fastest first."""
    tokens = config.data.tokens_per_microbatch
    # If a step is a fixed number of micro-batches, halving them would halve the step, so the size is kept.
    halved = config.schedule.docs_per_step > 0 and tokens // 2 >= FEWEST_TOKENS
    sizes = (tokens, tokens // 2) if halved else (tokens,)
    places = ("none", "states", "all") if hasattr(config.optimizer, "offload") else (None,)
    found = []
    for place, (how, on_host), size, reduce in product(places, _rungs(config, shape), sizes, _reductions(layout)):
        options = {CHECKPOINTING: how, OFFLOAD: on_host, _TOKENS: size, REDUCE: reduce}
        found.append(options | ({} if place is None else {_OPTIMIZER: place, OFFLOAD_ROOM: 0.0}))
    return found


def _rungs(config: Config, shape: ModelShape) -> list[tuple[Any, bool]]:
    """List the kinds of recomputation, in increasing order. Elementwise is left out if attention with a softcap is
    computed from matrix products, because it would keep all scores."""
    softcap = getattr(shape.config.get_text_config(), "attn_logit_softcapping", None)
    scores = softcap and config.model.attention != "flash"
    return [rung for rung in _RUNGS if not (scores and rung[0] == "elementwise")]


def _reductions(layout: RankLayout) -> tuple[bool, ...]:
    return (False, True) if layout.by_name["data_shard"] * layout.by_name["context"] > 1 else (False,)


def _that_fit(
    config: Config, shape: ModelShape, layout: RankLayout, room: float, ladder: Iterable[dict[str, Any]]
) -> Iterator[Way]:
    """Yield the first combination that fits, for each set of options that differ only in recomputation."""
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
    return Way(changes, changed, most_of(changed, shape, layout))


def _differs(config: Config, name: str, value: Any) -> bool:
    before = _value(config, name)
    return bool((False if before == "auto" else before) != value)


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def settle(
    config: Config,
    shape: ModelShape,
    layout: RankLayout,
    room: float,
    rates: Rates | None,
    hosts: Hosts | None = None,
) -> tuple[Config, dict[str, Any]]:
    """Choose values for the options that say `auto`: the least recomputation that fits, or the options with the
    smallest memory if none fit. Planned times choose whether gradients are reduced after each micro-batch; without
    rates, the first combination that fits is taken. Return the configuration and the options that were switched on."""
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
        best = min(fitting, key=lambda way: plan_time(way.config, shape, layout, rates, hosts=hosts).total)
    return best.config, best.changes


def settle_on(config: Config, ranks: Ranks, rates: Rates | None) -> tuple[Config, dict[str, Any]]:
    """Choose the options that say `auto` for this machine's GPUs. Every rank calls this with the same rates."""
    asked = any(_value(config, name) == "auto" for name in (REDUCE, CHECKPOINTING, OFFLOAD))
    if not asked or config.model.device == "cpu" or not torch.cuda.is_available():
        return config, {}
    room = ROOM * min(ranks.gather(float(device_memory())))
    try:
        shape = read_shape(config)
    except TruestepError:  # loading the model will raise this error, or the run needs no plan
        return config, {}
    return settle(config, shape, layout_of(config, ranks.size), room, rates)
