"""Weights that are not sharded: gradients are summed over the ranks once a step.

The weights of a float32 model are its own parameters. Those of a bfloat16 model are float32 masters beside it: each
micro-batch's gradient is added to a float32 buffer at once, and an update rounds the masters into the model once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from truestep.policy.cuts.pieces import Piece, pieces_of, sum_parts
from truestep.policy.weights.protocol import Weights
from truestep.ranks.group import ALONE, Ranks


class WholeWeights(Weights):
    """Takes a model with float32 weights and makes it compute in `dtype`."""

    def __init__(
        self, model: torch.nn.Module, dtype: torch.dtype, ranks: Ranks = ALONE, pieces: dict[str, Piece] | None = None
    ):
        """Take over a model. If it is cut, `pieces` has all weights of the uncut one, by name, in its order."""
        self.ranks, self.dtype = ranks, dtype
        self.pieces = pieces or pieces_of(model)
        self.master, self.frozen = {}, {}
        self._computed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # masters by the model's parameters
        # `named_parameters` gives a tied tensor once, under the name it is first registered by: its input embedding's.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                master = parameter if parameter.dtype == dtype else torch.nn.Parameter(parameter.detach())
                master.grad = torch.zeros_like(master)  # cleared later, never dropped
                self.master[name] = self._computed[parameter] = master
                if master is not parameter:
                    parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master.grad))
            # The parameters alone: buffers such as rotary frequencies stay float32, as transformers keeps them.
            parameter.data = parameter.data.to(dtype)
            if not parameter.requires_grad:
                self.frozen[name] = parameter.detach()

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Give the float32 buffer behind one of the model's parameters; None if it is frozen."""
        master = self._computed.get(parameter)
        return None if master is None else master.grad

    def zero_gradients(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    @contextmanager
    def head(self, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        weight = model.get_output_embeddings().weight
        yield weight.detach(), self.gradient_of(weight)

    @torch.no_grad()
    def reduce(self) -> None:
        # Over the ranks that computed other tokens with the same weights.
        self.ranks.sum_all("replicate", list(self.gradients.values()))
        sum_parts(self.ranks, self.pieces, self.gradients)

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._computed.items():
            if parameter is not master:
                parameter.copy_(master)


def _move_gradient(buffer: torch.Tensor, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    buffer.add_(parameter.grad)
    parameter.grad = None
