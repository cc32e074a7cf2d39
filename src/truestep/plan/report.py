"""The plan as a user reads it: a table of kinds, a verdict, and what would help."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truestep.config.schema import Config
from truestep.files import write_whole
from truestep.plan.advice import layout_of, layouts_that_fit, savings
from truestep.plan.memory import (
    GIB,
    LABELS,
    RankMemory,
    computed_size,
    has_reference,
    masters_offloaded,
    offloaded,
    offloads_reference,
    plan_memory,
    staged_bytes,
    state_bytes,
)
from truestep.plan.shape import ModelShape, read_shape
from truestep.ranks.axes import RankLayout

_SHOWN = 3
_FLOAT32 = 4


def make_plan_report(config: Config, ranks: int, memory: float | None, output: Path | None) -> tuple[str, bool]:
    """Write out the plan for so many ranks with so many GiB each, and tell whether it fits (without GiB: it does)."""
    shape = read_shape(config)
    layout = layout_of(config, ranks)
    planned = plan_memory(config, shape, layout)
    fits = memory is None or max(rank.total for rank in planned) <= memory * GIB
    lines = [_title(config, shape, layout), "", *_table(planned), "", *_remarks(config, shape, layout)]
    if memory is not None:
        lines += ["", *_verdict(config, shape, layout, planned, ranks, memory)]
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / "plan.json", json.dumps(_values(shape, layout, planned, memory), indent=1).encode())
    return "\n".join(lines), fits


def _title(config: Config, shape: ModelShape, layout: RankLayout) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in layout.by_name.items() if size > 1) or "one rank"
    trained = shape.part(0, 1, 1, 1, trained=True).all
    some = f", {trained / 1e6:,.1f} million of them trained" if trained < shape.total else ""
    return (
        f"{config.model.path}: {shape.total / 1e9:.2f} billion weights{some}, {config.model.dtype}, {sizes}\n"
        f"micro-batches of {config.data.tokens_per_microbatch:,} tokens"
    )


def _table(planned: Sequence[RankMemory]) -> list[str]:
    kinds = [kind for kind in planned[0].kinds if any(rank.kinds.get(kind) for rank in planned)]
    width = max(map(len, kinds))
    several = len(planned) > 1
    heads = [f"stage {rank.stage}" for rank in planned] if several else ["GiB a rank"]
    lines = [" " * width + "".join(f"{head:>12}" for head in heads)]
    for kind in kinds:
        lines.append(f"{kind:<{width}}" + "".join(f"{rank.kinds.get(kind, 0.0) / GIB:>12.2f}" for rank in planned))
    lines.append(f"{'peak of a step':<{width}}" + "".join(f"{rank.total / GIB:>12.2f}" for rank in planned))
    return lines


def _remarks(config: Config, shape: ModelShape, layout: RankLayout) -> list[str]:
    trained = shape.part(0, 1, 1, 1, trained=True)
    staged = staged_bytes(config, shape, layout)
    lines = [
        f"The plan takes {LABELS:.0%} of the tokens for labels. The allocator holds a few percent more than the peak.",
        f"From the first save on, a rank holds up to {staged / GIB:.1f} GiB of host memory for what it saves.",
    ]
    if offloaded(config):
        held = state_bytes(config, shape, trained) + (_FLOAT32 * trained.all if masters_offloaded(config) else 0)
        what = "the optimizer's state" + (" and float32 weights" if masters_offloaded(config) else "")
        lines.append(f"Host memory holds {what}: {held / GIB:.1f} GiB, shared among ranks as weights are.")
    if has_reference(config) and offloads_reference(config):
        held = computed_size(config) * shape.part(0, 1, 1, 1).all / GIB
        lines.append(f"Host memory holds the reference's weights: {held:.1f} GiB, shared among ranks as weights are.")
    if config.sampler is not None and config.sampler.type == "in_process":
        lines.append("The sampler's cache takes what is free while it samples, and gives it back.")
    return lines


def _verdict(
    config: Config, shape: ModelShape, layout: RankLayout, planned: Sequence[RankMemory], ranks: int, memory: float
) -> list[str]:
    most = max(rank.total for rank in planned) / GIB
    if most <= memory:
        return [f"It fits {memory:g} GiB: {memory - most:.1f} GiB are left."]
    lines = [f"It does not fit {memory:g} GiB: {most - memory:.1f} GiB are missing."]
    helpful = savings(config, shape, layout)
    if helpful:
        lines.append("Options that need less, each alone:")
        lines += [f"  {saving.option:<45} {saving.saved / GIB:>7.2f} GiB less" for saving in helpful]
    fitting = [pair for pair in layouts_that_fit(config, shape, ranks, memory * GIB) if pair[0] != layout]
    if fitting:
        lines.append(f"Layouts of {ranks} ranks that fit:")
        lines += [f"  {_options(other):<45} {size / GIB:>7.2f} GiB" for other, size in fitting[:_SHOWN]]
    if not helpful and not fitting:
        lines.append("No option here makes it fit: use more ranks (--ranks), or a smaller model.")
    return lines


def _options(layout: RankLayout) -> str:
    sizes = {name: size for name, size in layout.by_name.items() if name != "data_shard" and size > 1}
    return " ".join(f"--parallel.{name} {size}" for name, size in sizes.items()) or "--parallel.data_shard -1"


def _values(
    shape: ModelShape, layout: RankLayout, planned: Sequence[RankMemory], memory: float | None
) -> dict[str, Any]:
    return {
        "weights": shape.total,
        "layout": layout.by_name,
        "memory": memory,
        "stages": [{"stage": rank.stage, "bytes": rank.kinds, "total": rank.total} for rank in planned],
    }
