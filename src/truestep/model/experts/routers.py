"""Finds a model's routers, counts their choices, freezes them, and changes their biases.

A router is the module beside a layer's experts that returns logits, scores and choices for each token, as in
transformers. Its bias is a buffer with one number per expert, in the router or in the block that has both.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from truestep.model.experts.choosing import Choosing
from truestep.model.experts.grouped import GroupedExperts, is_experts
from truestep.model.experts.routing import ExpertSettings, Routing, seen
from truestep.model.fast.by_class import ours_runs, put_in
from truestep.types import RouteShape
from truestep.weights.errors import ModelError

SOFTMAX, SIGMOID = "softmax", "sigmoid"
_TOKENS = 7  # in the probe of a router's scores
_TOLERANCE = 1e-3


class CountedRouter(torch.nn.Module):
    number: torch.Tensor | None  # key of this layer among all counted layers
    terms: bool  # whether the loss has router terms
    kind: str  # how scores come from logits: softmax, sigmoid, or unknown (empty)
    chosen: int  # experts per token; 0: the experts of a token cannot be set
    asks: bool  # whether to ask the step which experts to compute

    def forward(self, *given: Any, **named: Any) -> Any:
        if self.number is None or not ours_runs():
            return super().forward(*given, **named)
        with self._choosing(self.number):
            logits, scores, index = super().forward(*given, **named)
        return logits, seen(scores, logits, index, self.number, self.terms), index

    def _choosing(self, number: torch.Tensor) -> AbstractContextManager[Any]:
        own: Any = self
        if not self.asks:
            return nullcontext()
        return Choosing(own.weight.shape[0], lambda index: torch.ops.truestep.experts_chosen(index, number))


@dataclass(frozen=True)
class Routed:
    """A layer with a router and experts."""

    name: str  # name of the experts' module
    experts: int
    block: Any
    router: Any

    @property
    def bias(self) -> tuple[str, torch.Tensor] | None:
        """The name and values of the model's own bias for choosing experts."""
        parent = self.name.rpartition(".")[0]
        for module, path in ((self.router, f"{parent}.{self._router_name}"), (self.block, parent)):
            for name, buffer in module.named_buffers(recurse=False):
                if "bias" in name and buffer.shape == (self.experts,):
                    return f"{path}.{name}", buffer
        return None

    @property
    def _router_name(self) -> str:
        return next(name for name, child in self.block.named_children() if child is self.router)


def routed_in(model: Any) -> Iterator[Routed]:
    """Yield the layers of a model that have routers, in order."""
    for name, block in model.named_modules():
        children = dict(block.named_children())
        for child_name, experts in children.items():
            if not is_experts(experts):
                continue
            router = next((child for child in children.values() if _is_router(child, experts.num_experts)), None)
            if router is not None:
                yield Routed(f"{name}.{child_name}", experts.num_experts, block, router)


def _is_router(module: Any, experts: int) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[0] == experts
    return is_matrix and type(module) is not torch.nn.Linear


def freeze_routers(model: Any) -> None:
    """Freeze the weights of all routers."""
    found = [routed.router for routed in routed_in(model)]
    if not found:
        raise no_routers(model, "router: frozen")
    for router in found:
        router.requires_grad_(False)


def no_routers(model: Any, option: str) -> ModelError:
    return ModelError(f"model.experts.{option}: {type(model).__name__} has no router that truestep recognises")


@torch.no_grad()
def count_routes(model: Any) -> None:
    """Replace routers by `CountedRouter`, in layers with `GroupedExperts`. The model's weights must not be unread."""
    for routed in list(routed_in(model)):
        experts = dict(model.named_modules())[routed.name]
        if isinstance(routed.router, CountedRouter) or not isinstance(experts, GroupedExperts):
            continue
        if (run := _runs(routed)) is not None:
            own, kind = run(None), _kind_of(run(None))
            chosen = own[2].shape[1] if kind and _can_be_given(run, kind) else 0
            put_in(routed.router, CountedRouter, number=None, terms=False, kind=kind, chosen=chosen, asks=False)


_Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits [T, E], scores and experts [T, k]


def _runs(routed: Routed) -> Callable[[torch.Tensor | None], _Result] | None:
    """Return a function that runs a router on a few tokens, with its own choice or a given one. None: the module is no
    router."""
    weight, bias = routed.router.weight, routed.bias
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, weight.shape[1], generator=generator).to(weight) * weight.shape[1] ** -0.5

    def run(given: tuple[Any, ...], index: torch.Tensor | None) -> _Result:
        with nullcontext() if index is None else Choosing(routed.experts, lambda _: index):
            found: _Result = routed.router(*given)
        return found

    for given in ((x,), (x, None if bias is None else bias[1])):
        try:
            found = run(given, None)
        except Exception:  # this router also takes the bias of its block
            continue
        is_one = isinstance(found, tuple) and len(found) == 3 and found[0].shape == (_TOKENS, routed.experts)
        return partial(run, given) if is_one else None
    return None


def _kind_of(found: _Result) -> str:
    """Tell how a router's scores come from its logits: softmax, sigmoid, or unknown (empty)."""
    logits, scores, index = found
    for kind, values in ((SOFTMAX, logits.softmax(-1)), (SIGMOID, logits.sigmoid())):
        factors = scores / values.gather(-1, index)
        mean = factors.mean(-1, keepdim=True) if index.shape[1] > 1 else factors.mean()
        if ((factors - mean).abs() <= _TOLERANCE * mean.abs()).all():
            return kind
    return ""


def _can_be_given(run: Callable[[torch.Tensor | None], _Result], kind: str) -> bool:
    """Tell whether a router weighs given experts as it weighs its own choice."""
    own = run(None)
    again = run(own[2])
    if not (torch.equal(again[1], own[1]) and torch.equal(again[2], own[2])):
        return False
    others = own[0].topk(own[2].shape[1], largest=False)[1].to(own[2].dtype)  # may be in groups not chosen
    found = run(others)
    return torch.equal(found[2], others) and _kind_of(found) == kind


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of an uncut model that have a `CountedRouter`."""

    experts: Mapping[str, int]  # number of experts, by the name of the experts' module
    biases: Mapping[str, str]  # the name of the bias buffer, for layers that have one
    shape: RouteShape  # the layers and number of experts per token that a step can set

    @staticmethod
    def of(model: Any) -> "RoutedLayers":
        found = [routed for routed in routed_in(model) if isinstance(routed.router, CountedRouter)]
        biases = {routed.name: routed.bias[0] for routed in found if routed.bias is not None}
        experts = {routed.name: routed.experts for routed in found}
        chosen = {routed.router.chosen for routed in found}
        can = len(chosen) == 1 and all(chosen) and len(found) == len(list(routed_in(model)))
        counts = tuple(experts.values()) if can else ()
        shape = RouteShape(
            counts,
            min(chosen, default=0),
            name=type(model).__name__,
            numbers=tuple(map(_number_of, experts)) if can else (),
            layers=model.config.get_text_config().num_hidden_layers,
        )
        return RoutedLayers(experts, biases, shape)


def _number_of(name: str) -> int:
    """Return the index of the hidden layer that a module is in: the first number in its name."""
    return int(next(part for part in name.split(".") if part.isdecimal()))


def check_settings(model: Any, settings: ExpertSettings) -> None:
    """Refuse options that the model's routers do not support. The model must be uncut."""
    options = [f"{name}: {value}" for name, value in settings.counted]
    if settings.replay == "require":
        options.append("replay: require")
        if not RoutedLayers.of(model).shape.experts:
            raise ModelError(
                f"model.experts.replay: require: {type(model).__name__} has no routers, or none that can be given the "
                "experts of a token"
            )
    if not options:
        return
    routers = list(routed_in(model))
    if not routers or not all(isinstance(routed.router, CountedRouter) for routed in routers):
        raise no_routers(model, options[0])
    name = type(model).__name__
    if settings.balance == "bias" and any(routed.bias is None for routed in routers):
        raise ModelError(f"model.experts.balance: bias: the routers of {name} have no bias of choices: set it to loss")
    if settings.balance == "loss" and not all(routed.router.kind for routed in routers):
        raise ModelError(
            f"model.experts.balance: loss: the scores of {name}'s routers are neither of a softmax nor of sigmoids"
        )


def make_routing(
    model: Any,
    layers: RoutedLayers,
    settings: ExpertSettings,
    buffers: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Routing | None:
    """Make the sums over a step for the routers on this rank. `buffers`: the bias buffers of layers on other ranks."""
    if not layers.experts:
        return None
    every = {**buffers, **dict(model.named_buffers())}
    biases = {layer: (name, every[name]) for layer, name in layers.biases.items()}
    shape = layers.shape if layers.shape.experts and settings.replay != "off" else None
    routing = Routing(layers.experts, settings, biases if settings.balance == "bias" else {}, shape)
    for routed in routed_in(model):
        if isinstance(routed.router, CountedRouter):
            routed.router.asks = routing.replays
            routed.router.terms = settings.has_terms
            routed.router.number = routing.add(routed.name, routed.router.kind == SIGMOID, device)
    return routing
