"""Differences between two computations of a step: metrics, norms of weights by layer, documents; and which of them
rounding explains."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from truestep.metrics.spent import of_the_machine
from truestep.rollouts.digests import fields_of
from truestep.run.weight_lines import WeightLine
from truestep.types import Rollout

# Metrics that depend on how the work was divided, or on earlier steps.
_NOT_OF_A_STEP = frozenset(
    {"num_micro_batches", "computed_tokens", "recomputed_prefix_tokens", "num_rejected", "num_put_aside"}
)
# The largest difference that another order of sums makes in the first step from the same weights (docs/contract.md,
# section 2). In half precision, the largest difference that rounding to 8 bits makes in a mean.
BOUND = {"float32": 1e-5}
HALF_BOUND = 2e-2
_LAYER = re.compile(r"(.*?\blayers\.\d+)\.")


@dataclass(frozen=True)
class Difference:
    """A number that differs between two computations of a step."""

    name: str
    first: float
    second: float

    @property
    def size(self) -> float:
        """The difference: relative for norms; for other metrics relative to the larger of the value and 1."""
        if self.first == self.second or (math.isnan(self.first) and math.isnan(self.second)):
            return 0.0
        largest = max(abs(self.first), abs(self.second))
        scale = largest if self.name.endswith("norm") else max(1.0, largest)
        found = abs(self.first - self.second) / scale
        return math.inf if math.isnan(found) else found


def compare_metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[Difference], int]:
    """Return the metrics of a step that differ, the largest difference first, and how many were compared."""
    found, compared = list[Difference](), 0
    for name, value in first.items():
        other = second.get(name)
        if name in _NOT_OF_A_STEP or of_the_machine(name) or other is None or not (_number(value) and _number(other)):
            continue
        compared += 1
        if value != other:
            found.append(Difference(name, float(value), float(other)))
    return sorted(found, key=lambda one: -one.size), compared


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class WeightDifferences:
    """How weights and gradients differ between two computations of a step."""

    weights: Sequence[str]  # weights whose bits differ
    compared: int
    norms: Sequence[Difference]  # norms that differ, by layer, the largest difference first

    @property
    def same(self) -> bool:
        """True if weights were compared, and all bits are the same."""
        return self.compared > 0 and not self.weights


def compare_weights(first: WeightLine | None, second: WeightLine | None) -> WeightDifferences | None:
    """Compare the weights after a step; None if one of the runs did not record them."""
    if first is None or second is None:
        return None
    mine, theirs = first.measured, second.measured
    alike = first.made_by.get("digests_of") == second.made_by.get("digests_of")  # masters, or copies on the device
    names = [name for name in mine.digests if name in theirs.digests] if alike else []
    odd = [name for name in names if mine.digests[name] != theirs.digests[name]]
    norms = []
    for what, one, other in (
        ("weight", mine.weight_norms, theirs.weight_norms),
        ("gradient", mine.gradient_norms, theirs.gradient_norms),
    ):
        here, there = by_layer(one), by_layer(other)
        norms += [
            Difference(f"{layer} {what} norm", here[layer], there[layer])
            for layer in here
            if layer in there and here[layer] != there[layer]
        ]
    return WeightDifferences(odd, len(names), sorted(norms, key=lambda one: -one.size))


def by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Combine the norms of weights into norms of layers. A weight outside all layers keeps its own."""
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        found = _LAYER.match(name)
        layer = found[1] if found else name.removesuffix(".weight")
        squares[layer] = squares.get(layer, 0.0) + norm * norm
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def compare_documents(first: Rollout, second: Rollout) -> list[str]:
    """Describe the differences of two documents with the same id: each field, with its first difference."""
    found = []
    for name in ("input_ids", "loss_mask"):
        found += _unequal(name, getattr(first, name), getattr(second, name), "token")
    mine, theirs = dict(fields_of(first)), dict(fields_of(second))
    for name in dict.fromkeys((*mine, *theirs)):
        one, other = mine.get(name), theirs.get(name)
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            if _fit(one, other):
                one, other = np.broadcast_arrays(one, other)
            found += _unequal(name, one, other, "label")
        elif one is None or other is None or one != other:
            found.append(f"{name}: {one} and {other}" if len(f"{one}{other}") < 100 else name)
    return found


def _fit(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether values of labels can be compared: one value may stand for all."""
    return first.shape == second.shape or (first.ndim == second.ndim == 1 and 1 in (len(first), len(second)))


def _unequal(name: str, first: np.ndarray, second: np.ndarray, unit: str) -> list[str]:
    if first.shape != second.shape:
        return [f"{name}: {len(first)} and {len(second)} {unit}s"]
    odd = np.argwhere(first != second)
    if not len(odd):
        return []
    at = tuple(int(place) for place in odd[0])
    count = f", and at {len(odd) - 1} more" if len(odd) > 1 else ""
    return [f"{name} at {unit} {at[0] if at else 0}: {first[at]} and {second[at]}{count}"]


def table(differences: Sequence[Difference], titles: tuple[str, str], most: int = 12) -> list[str]:
    """Return lines of a table of the largest differences."""
    shown = differences[:most]
    if not shown:
        return []
    width = max(len(one.name) for one in shown)
    lines = [f"  {'':<{width}}  {titles[0]:>14}  {titles[1]:>14}  difference"]
    lines += [f"  {one.name:<{width}}  {one.first:>14.8g}  {one.second:>14.8g}  {one.size:>10.1e}" for one in shown]
    if len(differences) > most:
        lines.append(f"  and {len(differences) - most} more")
    return lines
