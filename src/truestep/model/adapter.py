"""Adapters (LoRA): linear layers that compute W x + (alpha / rank) · B (A x), with W frozen and A and B trained.

An adapter's matrices are sub-modules of the layer, under peft's names `lora_A` and `lora_B`. Sharding, tensor
parallelism and pipeline stages therefore treat them as any other weights.

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

# Returns the values of an adapter's matrix, given its weight's name and shape.
Values = Callable[[str, torch.Size], torch.Tensor]


@dataclass(frozen=True)
class AdapterSettings:
    """The options of a new adapter."""

    rank: int
    alpha: float
    targets: str | Sequence[str] = ALL_LINEAR  # "all-linear", or names or name patterns of linear layers
    seed: int = 0


@dataclass(frozen=True)
class AdapterSource:
    """The origin of an adapter: options, a directory, or both. With both, the directory must match the options."""

    settings: AdapterSettings | None = None
    path: Path | None = None


@dataclass
class _Switch:
    on: bool = True


@dataclass(frozen=True, eq=False)
class Adapter:
    """A model's adapter. It is the same on every rank, even if the rank has only a part of the model."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # the names of all adapted layers
    switch: _Switch = field(default_factory=_Switch)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapter off within the block."""
        before, self.switch.on = self.switch.on, False
        try:
            yield
        finally:
            self.switch.on = before


class LoraLinear(torch.nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, layer: torch.nn.Linear, down: torch.Tensor, up: torch.Tensor, adapter: Adapter):
        torch.nn.Module.__init__(self)  # not Linear's, which would allocate a weight; the layer's own is used
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
    """Compute a layer's product, with its adapter if it has one, for all outputs or only those in `rows`. `bias` is
    added; the layer's own bias is not."""
    output = linear(inputs, _chosen(layer.weight, rows), bias)
    return layer._adapted(output, inputs, rows) if isinstance(layer, LoraLinear) else output


def _chosen(weight: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return weight if rows is None else weight.index_select(0, rows)


def _matrix(values: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(values.shape[1], values.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(values)
    return made


def target_modules(model: Any, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the linear layers that `targets` select. The head is never among them."""
    head = model.get_output_embeddings()
    named = {name: module for name, module in model.named_modules() if name and module is not head}
    plain = {name for name, module in named.items() if type(module) is torch.nn.Linear}
    if isinstance(targets, str):
        sizes = {name: [size for size in weight.shape if size > 1] for name, weight in model.named_parameters()}
        stacked = next((name for name, several in sizes.items() if len(several) > 2), None)
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
    """Tell whether a target (a name, the end of a name, or a pattern of either) matches a layer's name."""
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _no_match(model: Any, target: str, plain: set[str]) -> str:
    if any(matches(name, target) and module is model.get_output_embeddings() for name, module in model.named_modules()):
        return f"adapter.targets: {target!r} is the head, which stays as it is: name layers before it"
    some = ", ".join(sorted({name.rpartition(".")[2] for name in plain}))
    return f"adapter.targets: {target!r} matches no linear layer of {type(model).__name__} (it has {some})"


def attach(model: Any, adapter: Adapter, values: Values) -> None:
    """Freeze a model and add an adapter to its layers, in place."""
    model.requires_grad_(False)
    for name in adapter.modules:
        layer = model.get_submodule(name)
        down = values(f"{name}.{DOWN}.weight", torch.Size((adapter.rank, layer.in_features)))
        up = values(f"{name}.{UP}.weight", torch.Size((layer.out_features, adapter.rank)))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, down, up, adapter))


def first_values(seed: int) -> Values:
    """Return initial values as peft draws them: A uniform, B zero. A matrix's values depend only on the seed and its
    name, and are drawn when they are read."""

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
    """Return weights with the adapter merged: W + scale · B A, computed in float32 and rounded once. `tensors` may
    contain only some layers, each with its adapter."""
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
    """Return the name of the weight that an adapter's matrix belongs to; other names are returned unchanged."""
    for part in (DOWN, UP):
        if name.endswith(f".{part}.weight"):
            return name.removesuffix(f".{part}.weight") + ".weight"
    return name


def is_adapters(name: str) -> bool:
    """Tell whether a weight's name is that of an adapter's matrix."""
    return owner_of(name) != name
