"""Compares a layout's updates with the oracle: learning rates, clipping, optimizer states, and weights.

Each stage is judged given the run's own input to it, so that an error is reported in the stage that made it.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from truestep.step.update.optimizer import grouped, load_optimizer
from truestep.step.update.optimizers.by_weight import STEP
from truestep.tools.verify.blame import Blame, Judged
from truestep.tools.verify.difference import BOUND, ROUNDING, Difference, listed
from truestep.tools.verify.oracle.schedule import clip_scale, learning_rate
from truestep.tools.verify.oracle.updates import Interval, UpdateOracle, beyond, half_unit, updated
from truestep.weights.tensor_parts import STATE, StoredTensors

Tensors = Mapping[str, torch.Tensor]
_OWN_CODE = 1e-4  # allowed float32 error of a user's own optimizer, relative to the update


def scheduled(options: Mapping[str, Any], output: Path) -> Iterator[Difference]:
    """Compare the run's learning rates for steps of the user's schedule."""
    wrong = []
    for step, rate in json.loads((output / "schedule.json").read_text(encoding="utf-8")).items():
        right = learning_rate(options["optimizer"], options["schedule"]["steps"], int(step))
        wrong.append((_off(rate, right), f"of step {step} of the schedule is {rate:.4g}, not {right:.4g}"))
    value, name = max(wrong)
    count = sum(off > 1e-9 for off, _ in wrong)
    yield Difference(1, "learning rate", f"{name} ({count} of {len(wrong)} steps are wrong)", value, 1e-9)


def _off(value: float, right: float) -> float:
    return 0.0 if value == right else abs(value - right) / max(abs(right), 1e-300)


class Updates:
    """Judges the updates of a layout, in order."""

    def __init__(self, options: Mapping[str, Any], ends: Collection[str], positions: Sequence[int]):
        """`options`: the layout's options, as in a YAML file. `ends`: the names of the embedding and the head.
        `positions`: each update's step in the user's schedule."""
        self._options, self._positions = options["optimizer"], positions
        self._steps = options["schedule"]["steps"]
        self._own = _OwnCode(self._options) if self._options["type"] == "custom" else None
        self._oracle = UpdateOracle(self._options, ends)

    def differences(self, output: Path, number: int) -> Iterator[Difference]:
        folder, behind = output / str(number), output / str(number + 1)
        before, after = load_file(folder / "weights.safetensors"), load_file(behind / "weights.safetensors")
        gradients = load_file(folder / "gradients.safetensors")
        for name in before.keys() - gradients.keys():
            moved = float((after[name] - before[name]).abs().max())
            yield Difference(number, "frozen", f"weight {name} was changed", moved, 0.0)
        file = folder / "updates.json"
        updates = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        if len(updates) != 1:
            text = f"of the weights was made {len(updates)} times in this step, not once"
            yield Difference(number, "update", text, math.inf)
        if not updates:
            return
        rates, scale = updates[0]["rates"], updates[0]["scale"]
        taken = {**gradients, **load_file(folder / "changed.safetensors")}
        yield from self._rates(number, rates, gradients)
        right_scale = self._right_scale(gradients)
        yield from _clipping(number, gradients, taken, scale, right_scale)
        trained = {name: before[name].double() for name in gradients if name in before}
        if self._own is not None:
            clipped = {name: gradients[name].double() * right_scale for name in trained}
            yield from self._own.differences(number, trained, clipped, after, rates)
            return
        states = [_States(each / "states") for each in (folder, behind)]
        judged = [
            Judged(
                self._oracle,
                name,
                weight,
                after[name].double(),
                taken[name].double() * scale,
                states[0].of(name),
                states[1].of(name),
                number,
                rates.get(name, 0.0),
            )
            for name, weight in trained.items()
        ]
        yield from _states(judged, number, scale)
        yield from _weights(judged, number)

    def _rates(self, number: int, rates: Mapping[str, float], gradients: Tensors) -> Iterator[Difference]:
        position = self._positions[number - 1]
        right = learning_rate(self._options, self._steps, position)
        found: dict[float, list[str]] = {}
        for name in gradients:
            found.setdefault(rates.get(name, 0.0), []).append(name)
        for rate, names in found.items():
            which = "every weight" if len(found) == 1 else listed(names)
            text = f"of {which} is {rate:.4g} at step {position} of the schedule, not {right:.4g}"
            yield Difference(number, "learning rate", text, _off(rate, right), 1e-9)

    def _right_scale(self, gradients: Tensors) -> float:
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        return clip_scale(norm, self._options["gradient_clip"])


def _clipping(number: int, gradients: Tensors, taken: Tensors, scale: float, right: float) -> Iterator[Difference]:
    """Compare the gradients that the optimizer used with the step's gradients, clipped by their norm."""
    blame = Blame(number)
    for name, gradient in gradients.items():
        exact, found = gradient.double(), taken[name].double() * scale
        size = float(exact.norm())
        factor = float((found * exact).sum()) / max(size**2, 1e-300)
        other = float((found - factor * exact).norm()) / max(size, 1e-30)
        blame.found("taken gradient", name, "of the optimizer is not the step's", other)
        if size and other <= BOUND:
            text = f"of the gradient: it was multiplied by {factor:.4g}, not by {right:.4g}"
            blame.found("clipping", name, text, abs(factor / right - 1))
    yield from blame.differences()


class _States:
    """Optimizer states of whole weights, joined from ranks' shards."""

    def __init__(self, folder: Path):
        self._stored = StoredTensors(folder)

    @cached_property
    def _keys(self) -> dict[str, list[tuple[str, str]]]:
        found: dict[str, list[tuple[str, str]]] = {}
        for key in self._stored.keys():  # noqa: SIM118 - not a dictionary
            name, _, kind = key.removeprefix(STATE).rpartition(".")
            found.setdefault(name, []).append((kind, key))
        return found

    def of(self, name: str) -> dict[str, torch.Tensor]:
        return {kind: self._stored.read_whole(key) for kind, key in self._keys.get(name, [])}


def _states(judged: Sequence[Judged], number: int, scale: float) -> Iterator[Difference]:
    """Compare the moments of each weight after the update."""
    blame = Blame(number)
    for each in judged:
        if not each.after or each.moments_stood_still:
            text = "is that of before the update" if each.after else "is missing"
            blame.found("moment", each.name, text, math.inf)
            continue
        if STEP in each.after and int(each.after[STEP]) != number:
            blame.found("bias correction", each.name, f"by update {int(each.after[STEP])}, not {number}", math.inf)
        values = {kind: (beyond(moment), moment) for kind, moment in each.moments().items()}
        factor = each.factor_of_the_gradient() if any(value > ROUNDING for value, _ in values.values()) else None
        for kind, (value, moment) in values.items():
            if factor is not None:
                scaled = abs(factor * scale - 1) < 0.01 and abs(scale - 1) > 0.02
                kind = "clipping" if scaled else "taken gradient"
                text = f"of the moments is {factor:.4g} times the clipped one"
                if scaled:
                    text = f"did not reach the moments, whose gradient is {factor:.4g} times the clipped one"
                blame.found(kind, each.name, text, value, ROUNDING, each.weight.numel())
            else:
                blame.found(
                    "moment", each.name, each.moment_text(kind, moment, value), value, ROUNDING, each.weight.numel()
                )
    yield from blame.differences()


def _weights(judged: Sequence[Judged], number: int) -> Iterator[Difference]:
    """Compare the weights after the update, given the run's own moments."""
    blame = Blame(number)
    for each in judged:
        change = each.change()
        size = float((change.step.abs() + each.rate * each.decay * each.weight.abs()).norm())
        outside = each.outside(updated(each.weight, each.rate, each.decay, change))
        value = float(outside.norm()) / max(size, 1e-300)
        kind, text = ("update", "") if value <= ROUNDING else each.explained(change)
        blame.found(kind, each.name, text, value, ROUNDING, each.weight.numel())
    yield from blame.differences()


class _OwnCode:
    """A user's own optimizer, run in float64 on whole weights."""

    def __init__(self, options: Mapping[str, Any]):
        self._options = options
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None

    def differences(
        self, number: int, weights: Tensors, gradients: Tensors, after: Tensors, rates: Mapping[str, float]
    ) -> Iterator[Difference]:
        for name, right in self._updated(weights, gradients, max(rates.values(), default=0.0)).items():
            weight, found = weights[name], after[name].double()
            slack = 3 * half_unit(torch.maximum(weight.abs(), right.abs())) + _OWN_CODE * (right - weight).abs()
            allowed = Interval(right - slack, right + slack)
            outside = (found - torch.minimum(torch.maximum(found, allowed.low), allowed.high)).norm()
            moved, wanted = found - weight, right - weight
            factor = float((moved * wanted).sum() / wanted.square().sum().clamp(min=1e-300))
            value = float(outside / wanted.norm().clamp(min=1e-300))
            text = f"of {name}" if value <= ROUNDING else f"of {name} is {factor:.4g} times what it should be"
            yield Difference(number, "update", text, value, ROUNDING)

    def _updated(self, weights: Tensors, gradients: Tensors, rate: float) -> dict[str, torch.Tensor]:
        if self._optimizer is None:
            self._parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
            make = load_optimizer(self._options["function"], self._options["options"])
            self._optimizer = make(grouped(self._parameters))
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                parameter.grad = gradients[name]
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
