"""Replaces a router's choice of experts, so that a step can set the experts and the engine can record them.

A router's code scores all experts, chooses the highest scores with `topk`, and makes weights of the chosen scores.
Within `Choosing`, the call of `topk` may return other experts, with their scores gathered from all scores. The router's
own code then makes the weights of these experts, so normalisation and gradient are the model's own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Returns the experts to compute [T, k], given a router's own choice [T, k].
Choose = Callable[[torch.Tensor], torch.Tensor]


class Choosing(TorchFunctionMode):
    """A context for a router's forward pass. It replaces the result of `topk`."""

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
        if scores.ndim != 2 or scores.shape[1] != self._experts:  # `topk` over groups of experts
            return function(*arguments, **named)
        index = self._choose(torch.ops.truestep.top_experts(scores.detach(), many))
        return scores.gather(-1, index), index


def _asked(input: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the scores and k of a `topk` call."""
    assert largest and dim in (-1, input.ndim - 1), "the highest scores of each token"
    return input, k
