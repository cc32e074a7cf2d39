"""Finds where two computations of a step first differ: in the forward pass, the gradient of some layers, or the update.

Metrics show differences in the forward pass, and norms of gradients those in the backward pass. A backward pass goes
from the last layer to the first, so if it first differs in a layer, the gradients of later layers are the same.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from truestep.run.weight_lines import WeightLine
from truestep.tools.replay.differences import Difference, by_layer

Stage = Literal["forward", "gradient", "update"]
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.")
_CLEAR = 3.0  # a layer is named if its difference is this many times the next largest
_MOST = 3  # weights that are named


@dataclass(frozen=True)
class Where:
    """The stage of a step in which two computations of it first differ, and the layer or weights, in words."""

    stage: Stage
    text: str


def find_stage(
    metrics: Sequence[Difference],
    first: WeightLine | None,
    second: WeightLine | None,
    before_same: bool,
    least: float = 0.0,
) -> Where | None:
    """Find where two computations of a step first differ. `before_same`: the weights before the step are known to be
    the same. `least`: differences up to this size are rounding. None if nothing differs by more."""
    metrics = [one for one in metrics if one.size > least]
    forward = [one for one in metrics if not _of_gradient(one.name)]
    if forward:
        text = f"it is the forward pass ({_largest(forward)})" + _layer_that_stands_out(first, second)
        return Where("forward", text + ("" if before_same else ", or the weights before it"))
    alike = "the same" if not least else "the same but for rounding"
    odd = _odd_gradients(first, second, least)
    if odd or metrics:
        return Where("gradient", f"the forward pass is {alike}, and it is {_of_the_backward_pass(odd, first)}")
    changed = _odd_bits(first, second)
    if least or not changed or first is None:
        return None
    count = len(first.measured.digests)
    which = f"{len(changed)} of {count} weights" if 2 * len(changed) > count else _named(changed)
    text = f"the forward pass and the norms of all gradients are the same, and it is the update of {which}"
    return Where("update", f"{text}, or what came after it")


def _of_gradient(metric: str) -> bool:
    return metric.startswith("grad")


def _largest(found: Sequence[Difference]) -> str:
    one = max(found, key=lambda one: one.size)
    return f"{one.name} by {one.size:.1e}"


def _odd_gradients(first: WeightLine | None, second: WeightLine | None, least: float) -> list[str]:
    """Return the weights whose gradient norms differ between two lines, in the model's order."""
    if first is None or second is None:
        return []
    mine, theirs = first.measured.gradient_norms, second.measured.gradient_norms
    return [name for name in mine if name in theirs and Difference("norm", mine[name], theirs[name]).size > least]


def _odd_bits(first: WeightLine | None, second: WeightLine | None) -> list[str]:
    if first is None or second is None:
        return []
    mine, theirs = first.measured.digests, second.measured.digests
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]


def _layer_that_stands_out(first: WeightLine | None, second: WeightLine | None) -> str:
    """Name the layer whose gradient differs far more than those of the others, if there is one."""
    if first is None or second is None:
        return ""
    mine, theirs = by_layer(first.measured.gradient_norms), by_layer(second.measured.gradient_norms)
    sizes = [Difference(f"{name} norm", mine[name], theirs[name]) for name in mine if name in theirs]
    ranked = sorted(sizes, key=lambda one: -one.size)
    if len(ranked) < 2 or not ranked[0].size or ranked[0].size < _CLEAR * ranked[1].size:
        return ""
    return f"; the gradient of {ranked[0].name.removesuffix(' norm')} differs most, by {ranked[0].size:.1e}"


def _of_the_backward_pass(odd: Sequence[str], line: WeightLine | None) -> str:
    """Say which part of the backward pass differs, judging by the weights whose gradients differ."""
    if not odd or line is None:
        return "the gradient or its norm"
    names = list(line.measured.gradient_norms)
    places = [place for place, name in enumerate(names) if _LAYER.match(name)]
    if not places:
        return f"the gradient of {_named(odd)}"
    order = {name: place for place, name in enumerate(names)}
    behind = [name for name in odd if order[name] > places[-1]]
    layers = {int(found[2]): found[1] for name in odd if (found := _LAYER.match(name))}
    if not layers:
        if before := [name for name in odd if order[name] < places[0]]:
            found = _LAYER.match(names[places[0]])
            entry = f", or the entry of {found[1]}{found[2]}" if found else ""
            return f"the gradient of {_named(before)} alone{entry}: no layer's gradient differs"
        return f"the gradient of {_named(odd)} alone, not what goes on to the layers"
    last = max(layers)
    if behind:
        return "the backward pass of the head, the loss or the last norm: the gradients of all layers differ"
    all_below = set(range(min(_layers(names)), last + 1)) <= layers.keys()
    own = [name for name in odd if (found := _LAYER.match(name)) and int(found[2]) == last]
    if len(layers) == 1 and (last > min(_layers(names)) or len(own) == len(odd) < 3):
        return f"the gradient of {_named(own)} alone, not what goes on to the layers before"
    if all_below:
        which = f"{layers[last]}{last}"
        if last == max(_layers(names)):
            return f"the backward pass of {which} or of what is behind it: the gradients of all layers differ"
        entry = f"or the entry of {layers[last]}{min(one for one in _layers(names) if one > last)}"
        return f"the backward pass of {which}, {entry}: {which} and what is before it differ, and nothing behind it"
    return f"the gradient of {_named(odd)}"


def _layers(names: Sequence[str]) -> set[int]:
    return {int(found[2]) for name in names if (found := _LAYER.match(name))}


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"
