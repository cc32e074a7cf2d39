"""Takes the choice of experts out of a router's own code, so that a step can give it, and the engine can record it.

A router's code scores all experts, chooses the highest scores with `topk`, and makes weights of the chosen scores.
Within `Choosing` other experts may be chosen: the values that `topk` returns are then read from all scores at these
experts. So their weights are the model's own, normalised by its own code, with their gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Returns the experts to compute [T, k], given a router's own choice [T, k].
Choose = Callable[[torch.Tensor], torch.Tensor]


class Choosing(TorchFunctionMode):
    """A context for the forward pass of a router."""

    def __init__(self, experts: int, choose: Choose):
        super().__init__()
        self._experts, self._choose = experts, choose

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function not in (torch.topk, torch.Tensor.topk):
            return function(*arguments, **named)
        scores, many = _asked(*arguments, **named)
        if scores.ndim != 2 or scores.shape[1] != self._experts:  # a choice of groups of experts
            return function(*arguments, **named)
        index = self._choose(torch.ops.truestep.top_experts(scores.detach(), many))
        return scores.gather(-1, index), index


def _asked(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return what a call of `topk` asks for, by the names of its arguments."""
    assert largest and dim in (-1, input.ndim - 1), "the highest scores of each token"
    return input, k
