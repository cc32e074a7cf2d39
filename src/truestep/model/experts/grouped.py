"""The module that replaces a model family's own experts, by class. Routing stays the model's own code.

transformers declares the form of experts on the class (`use_experts_implementation`): with a gate or without, with
biases or without, weights transposed or not. A module is replaced only if ours gives the same outputs as its own code.
"""

from collections.abc import Iterator
from typing import Any

import torch

from truestep.model.experts.mixture import Weight, mixture
from truestep.model.experts.over_ranks import ExpertRanks, mixture_over_ranks
from truestep.model.fast.by_class import ours_runs, put_in
from truestep.weights.gradient_buffers import enter
from truestep.weights.whole import WholeWeights

_TOKENS = 5  # in the comparison with a module's own forward pass
_TOLERANCE = 1e-4


class GroupedExperts(torch.nn.Module):
    first_number: torch.Tensor | None
    last_number: torch.Tensor | None
    ranks: ExpertRanks | None  # the ranks that the experts are divided over, if any

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        if not ours_runs():
            return super().forward(x, index, weights)
        adds = torch.is_grad_enabled() and x.requires_grad
        first, last = self.weights_of(adds)
        if self.ranks is not None:
            return mixture_over_ranks(x, index, weights, first, last, self.activation, self.ranks)
        return mixture(x, index, weights, first, last, self.activation)

    def weights_of(self, adds: bool) -> tuple[Weight, Weight]:
        """Return the weights of the two products. `adds`: weights with a number add their gradients to float32
        buffers."""
        owner: Any = self
        found = []
        for name, number in ((_first_name(owner), self.first_number), ("down_proj", self.last_number)):
            values, by_rows = getattr(owner, name), not owner.is_transposed
            bias = getattr(owner, f"{name}_bias") if owner.has_bias else None
            if adds and number is not None:
                found.append(Weight(values.detach(), by_rows, bias, number))
            else:
                found.append(Weight(values, by_rows, bias))
        return found[0], found[1]

    def activation(self, inner: torch.Tensor) -> torch.Tensor:
        owner: Any = self
        made: torch.Tensor = owner._apply_gate(inner) if owner.has_gate else owner.act_fn(inner)
        return made


def _first_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def is_experts(module: Any) -> bool:
    """Tell whether a module holds the weights of experts in a form that `GroupedExperts` computes."""
    if not all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts")):
        return False
    weights = [getattr(module, name, None) for name in (_first_name(module), "down_proj")]
    stacked = all(isinstance(weight, torch.nn.Parameter) and weight.ndim == 3 for weight in weights)
    return stacked and not getattr(module, "has_post_expert_norm", False)


def grouped_in(model: Any) -> Iterator[tuple[str, GroupedExperts]]:
    """Yield the `GroupedExperts` of a model with their names, in the order of layers."""
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            yield name, module


@torch.no_grad()
def group_experts(model: Any) -> None:
    """Replace the class of each module of experts if `GroupedExperts` gives the same outputs as its own code. The
    model's weights must not be unread."""
    for module in list(model.modules()):
        if is_experts(module) and not isinstance(module, GroupedExperts):
            _replace(module)


def _replace(module: Any) -> None:
    own: Any = type(module)
    weight = module.down_proj
    hidden = weight.shape[2 if module.is_transposed else 1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, hidden, generator=generator).to(weight)
    experts = min(2, weight.shape[0])
    index = torch.stack([torch.randperm(weight.shape[0], generator=generator)[:experts] for _ in range(_TOKENS)])
    scores = torch.rand(_TOKENS, experts, generator=generator).to(weight)
    index = index.to(weight.device)
    implementation = module.config._experts_implementation
    module.config._experts_implementation = "eager"  # the loop in the family's own code, which takes any width
    try:
        expected = module(x, index, scores)
    except Exception:  # not experts, although it has these attributes
        return
    finally:
        module.config._experts_implementation = implementation
    put_in(module, GroupedExperts, first_number=None, last_number=None, ranks=None)
    found = module(x, index, scores)
    same = isinstance(expected, torch.Tensor) and expected.shape == found.shape
    if not same or not (found - expected).norm() <= _TOLERANCE * expected.norm():
        module.__class__ = own


def settle_experts(model: Any, weights: Any) -> None:
    """Let experts add their gradients to float32 buffers, if this rank has whole weights and the model computes on
    rounded copies."""
    if not isinstance(weights, WholeWeights):
        return
    rounded = set(weights.rounded)
    for _, module in grouped_in(model):
        own: Any = module
        first, last = getattr(own, _first_name(own)), own.down_proj
        module.first_number = enter(weights, first) if first in rounded else None
        module.last_number = enter(weights, last) if last in rounded else None
