"""Weights of which every rank holds all: gradients are summed over the ranks once a step.

For a float32 model the weights are the model's own parameters. For a bfloat16 model they are float32 masters beside it:
each micro-batch's gradient is added to a float32 buffer as soon as autograd has it, and an update rounds the masters
into the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from truestep.policy.cuts.pieces import Piece, pieces_of, sum_parts
from truestep.policy.weights.protocol import StagePass, Weights
from truestep.ranks.group import ALONE, Ranks


class WholeWeights(Weights):
    """Takes a model with float32 weights and makes it compute in `dtype`."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
        pieces: Mapping[str, Piece] | None = None,
    ):
        """`pieces` where the model is cut: of all its weights, by name, in the whole model's order."""
        self.ranks, self.dtype = ranks, dtype
        self.pieces = dict(pieces or pieces_of(model))
        # `named_parameters` gives a tied tensor once, under the name it is first registered by: its input embedding's.
        self._computed = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.master, self.frozen = {}, {}
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                self.frozen[name] = parameter.detach()
                parameter.data = parameter.data.to(dtype)
        for name, parameter in self._computed.items():
            master = parameter
            if parameter.dtype != dtype:
                master = torch.nn.Parameter(parameter.detach())
                # The parameters alone: buffers such as rotary frequencies stay float32, as transformers keeps them.
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(self._accumulate_into(master))
            master.grad = torch.zeros_like(master)
            self.master[name] = master
        self._names = {id(parameter): name for name, parameter in self._computed.items()}

    @staticmethod
    def _accumulate_into(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        def accumulate(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            _gradient(master).add_(parameter.grad)
            parameter.grad = None

        return accumulate

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: _gradient(master) for name, master in self.master.items()}

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Give the float32 buffer behind one of the model's parameters; None if it is frozen."""
        name = self._names.get(id(parameter))
        return None if name is None else _gradient(self.master[name])

    def zero_gradients(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    def before_forward(self, coming: StagePass) -> None:
        """Nothing: all weights are here."""

    def before_backward(self, coming: StagePass) -> None:
        """Nothing: gradients are summed when the step has all of them."""

    def head_parameter(self, model: Any) -> torch.nn.Parameter:
        return model.get_output_embeddings().weight

    @contextmanager
    def head(self, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        weight = self.head_parameter(model)
        yield weight.detach(), self.gradient_of(weight)

    @torch.no_grad()
    def reduce(self) -> None:
        # Over the ranks that computed other tokens with the same weights.
        self.ranks.sum_all("replicate", list(self.gradients.values()))
        sum_parts(self.ranks, self.pieces, self.gradients)

    @torch.no_grad()
    def publish(self) -> None:
        for name, parameter in self._computed.items():
            if parameter is not self.master[name]:
                parameter.copy_(self.master[name])

    @contextmanager
    def gathered(self) -> Iterator[None]:
        yield

    def shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return piece

    def unshard(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(parts)


def _gradient(master: torch.nn.Parameter) -> torch.Tensor:
    assert master.grad is not None, "a gradient buffer is cleared, never dropped"
    return master.grad
