"""Adapters (LoRA): linear layers that compute W x + (alpha / rank) · B (A x), with W frozen and A and B trained.

An adapter's matrices are modules of the layer, under the names that peft gives them: `lora_A` and `lora_B`. So layers
are sharded, cut and put into stages with them as with any other weights.

Dimensions: I inputs of a layer, O its outputs, R the adapter's rank.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from truestep.weights.errors import ModelError
from truestep.weights.lazy import Unread

ALL_LINEAR = "all-linear"
DOWN, UP = "lora_A", "lora_B"  # [R, I] and [O, R]

# Gives the values of an adapter's matrix, by its weight's name and shape.
Values = Callable[[str, torch.Size], torch.Tensor]


@dataclass(frozen=True)
class AdapterSettings:
    """What is asked for: the options of a new adapter."""

    rank: int
    alpha: float
    targets: str | Sequence[str] = ALL_LINEAR  # or names of linear layers, or patterns of names
    seed: int = 0


@dataclass(frozen=True)
class AdapterSource:
    """The origin of an adapter: options, or a directory. With both, the directory's must be as the options say."""

    settings: AdapterSettings | None = None
    path: Path | None = None


@dataclass
class _Switch:
    on: bool = True


@dataclass(frozen=True, eq=False)
class Adapter:
    """The adapter of a model: the same on every rank, whatever part of the model is here."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # the names of all layers that it changes
    switch: _Switch = field(default_factory=_Switch)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have the model compute without the adapter."""
        before, self.switch.on = self.switch.on, False
        try:
            yield
        finally:
            self.switch.on = before


class LoraLinear(torch.nn.Linear):
    """A linear layer with its adapter."""

    def __init__(self, layer: torch.nn.Linear, down: torch.Tensor, up: torch.Tensor, adapter: Adapter):
        torch.nn.Module.__init__(self)  # the weights are the layer's own
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A, self.lora_B = _matrix(down), _matrix(up)
        self.scale, self.switch = adapter.scale, adapter.switch
        self.train(layer.training)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._adapted(linear(inputs, self.weight, self.bias), inputs, None)

    def _adapted(self, output: torch.Tensor, inputs: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if not self.switch.on:
            return output
        low = linear(inputs, self.lora_A.weight) * self.scale
        return output + linear(low, _chosen(self.lora_B.weight, rows))


def product(
    layer: torch.nn.Linear,
    inputs: torch.Tensor,
    rows: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply with a layer's weight and with its adapter, if it has one: all of its outputs, or `rows` of them. The
    layer's own bias is left out."""
    output = linear(inputs, _chosen(layer.weight, rows), bias)
    return layer._adapted(output, inputs, rows) if isinstance(layer, LoraLinear) else output


def _chosen(weight: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return weight if rows is None else weight.index_select(0, rows)


def _matrix(values: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(values)
    return made


def target_modules(model: Any, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Find the linear layers that an adapter changes, by their names; the head is none of them."""
    head = model.get_output_embeddings()
    named = {name: module for name, module in model.named_modules() if name and module is not head}
    plain = {name for name, module in named.items() if type(module) is torch.nn.Linear}
    if isinstance(targets, str):
        stacked = next((name for name, weight in model.named_parameters() if weight.dim() > 2), None)
        if stacked is not None:
            raise ModelError(
                f"adapter.targets: {targets} would leave out weights of {type(model).__name__} that are not linear "
                f"layers, such as the experts in {stacked}: name the layers, such as [q_proj, v_proj]"
            )
        return tuple(name for name in named if name in plain)
    found: set[str] = set()
    for target in targets:
        met = {name for name in named if matches(name, target)}
        odd = sorted(met - plain)
        if odd:
            kind = type(named[odd[0]]).__name__
            raise ModelError(f"adapter.targets: {target!r} matches {odd[0]}, a {kind}, which is not a linear layer")
        if not met:
            raise ModelError(_no_match(model, target, plain))
        found |= met
    return tuple(name for name in named if name in found)


def matches(name: str, target: str) -> bool:
    """Tell whether a target names a layer: by its whole name, by the end of its name, or by a pattern of either."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _no_match(model: Any, target: str, plain: set[str]) -> str:
    if any(matches(name, target) and module is model.get_output_embeddings() for name, module in model.named_modules()):
        return f"adapter.targets: {target!r} is the head, which stays as it is: name layers before it"
    some = ", ".join(sorted({name.rpartition(".")[2] for name in plain}))
    return f"adapter.targets: {target!r} matches no linear layer of {type(model).__name__} (it has {some})"


def attach(model: Any, adapter: Adapter, values: Values) -> None:
    """Freeze a model and give its layers an adapter, in place."""
    model.requires_grad_(False)
    for name in adapter.modules:
        layer = model.get_submodule(name)
        down = values(f"{name}.{DOWN}.weight", torch.Size((adapter.rank, layer.in_features)))
        up = values(f"{name}.{UP}.weight", torch.Size((layer.out_features, adapter.rank)))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, down, up, adapter))


def first_values(seed: int) -> Values:
    """Give the first values of an adapter, as peft draws them: A uniform, B zero. They depend on the seed and the
    weight's name alone, and are drawn when they are read."""

    def values(name: str, shape: torch.Size) -> torch.Tensor:
        looks = torch.empty(shape, device="meta")
        return Unread.of(looks, partial(_draw if f".{DOWN}." in name else _zeros, name, shape, seed))

    return values


def _draw(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    digest = sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    values = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def _zeros(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.zeros(shape)


@torch.no_grad()
def merged(tensors: Mapping[str, torch.Tensor], adapter: Adapter, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Give the weights of the model without an adapter that computes the same: W + scale · B A, added in float32 and
    rounded once. `tensors` may be those of some layers only, each with its adapter."""
    found = {}
    for name, tensor in tensors.items():
        if is_adapters(name):
            continue
        layer = name.removesuffix(".weight")
        down, up = (tensors.get(f"{layer}.{part}.weight") for part in (DOWN, UP))
        if down is not None and up is not None and name.endswith(".weight"):
            tensor = tensor.float() + adapter.scale * (up.float() @ down.float())
        found[name] = tensor.to(dtype)
    return found


def owner_of(name: str) -> str:
    """Give the name of the weight that an adapter's weight belongs to; that of any other weight is its own."""
    for part in (DOWN, UP):
        if name.endswith(f".{part}.weight"):
            return name.removesuffix(f".{part}.weight") + ".weight"
    return name


def is_adapters(name: str) -> bool:
    """Tell whether a weight belongs to an adapter, by its name."""
    return owner_of(name) != name
