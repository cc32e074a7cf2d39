"""Float32 weights and float32 gradients, whatever type the model computes in.

For a float32 model the weights are the model's own parameters. For a bfloat16 model they are float32 masters beside it:
each micro-batch's gradient is added to a float32 buffer as soon as autograd has it, and an update rounds the masters
into the model once.

Here every rank holds all of them, and gradients are summed over the ranks once a step. `shards` spreads them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from truestep.policy.cuts.pieces import Piece, pieces_of, sum_parts
from truestep.ranks.group import ALONE, Ranks, in_buckets


@dataclass(frozen=True)
class Turn:
    """A pass of one micro-batch through a stage, for which weights are made ready."""

    layers: slice
    begins: bool  # with the embedding
    ends: bool  # with the head, and what is before it
    final: bool  # whether the backward passes of no other stage that is here come later
    number: int  # of the micro-batch, from 0
    of: int  # micro-batches of the step
    group: int  # micro-batches that share a gathering
    backward: bool  # whether the step has backward passes

    @property
    def last(self) -> bool:
        return self.number == self.of - 1

    @property
    def last_of_group(self) -> bool:
        return self.last or self.number % self.group == self.group - 1


class Weights:
    """Takes a model with float32 weights and makes it compute in `dtype`."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
        pieces: Mapping[str, Piece] | None = None,
    ):
        """`pieces` where the model is not whole: of all its weights, by name, in the whole model's order."""
        self.ranks, self.dtype = ranks, dtype
        self.pieces = dict(pieces or pieces_of(model))
        # `named_parameters` gives a tied tensor once, under the name it is first registered by: its input embedding's.
        self._computed = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.master: dict[str, torch.nn.Parameter] = {}
        self.frozen: dict[str, torch.Tensor] = {}  # float32, as they came and as they are saved
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

    @property
    def device(self) -> torch.device:
        return next(iter((self.master or self.frozen).values())).device

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
        """The float32 buffer behind one of the model's parameters; None if it is frozen."""
        name = self._names.get(id(parameter))
        return None if name is None else _gradient(self.master[name])

    def zero_gradients(self) -> None:
        for gradient in self.gradients.values():
            gradient.zero_()

    # ---- A step: gradients are whole, and the same on every rank that holds them, when `reduce` returns.

    def before_forward(self, turn: Turn) -> None:
        """Before each forward pass of a step."""

    def before_backward(self, turn: Turn) -> None:
        """Before each backward pass of a step."""

    def head_parameter(self, model: Any) -> torch.nn.Parameter:  # [V, H]
        return model.get_output_embeddings().weight

    @contextmanager
    def head(self, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """The head's weight as the model computes with it, and the float32 buffer of its gradient (None: frozen)."""
        weight = self.head_parameter(model)
        yield weight.detach(), self.gradient_of(weight)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the ranks: a plain sum, the denominators are in them already."""
        self._reduce_data()
        sum_parts(self.ranks, self.pieces, self.gradients)

    def _reduce_data(self) -> None:
        """Over the ranks that computed other tokens with the same weights."""
        self.ranks.sum_all("replicate", list(self.gradients.values()))

    # ---- Parts and wholes. `master` and `gradients` hold this rank's part of each tensor; here, all of it.

    def mine(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of this weight's shape."""
        return self._shard(name, self.pieces[name].slice(whole, self.ranks))

    def _shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return piece

    def _unshard(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every rank of a shard group calls this, with its parts of the same weights."""
        return dict(parts)

    @torch.no_grad()
    def on_first(
        self, parts: Mapping[str, torch.Tensor | None], dtype: torch.dtype = torch.float32
    ) -> dict[str, torch.Tensor]:
        """All of tensors of the weights' shapes, on the host of the first rank; the others get nothing. Every rank
        calls this, for the same names in order, with its parts, or None where a weight is on another stage."""
        found = {}
        for names in in_buckets({name: self.pieces[name].shape.numel() for name in parts}):
            # Of a tied embedding, which two stages have, the first one's.
            sent = [name for name in names if self.ranks.stage == self.pieces[name].stages[0]]
            here = self._unshard({name: part.detach() for name in sent if (part := parts[name]) is not None})
            for name in names:
                whole = self._whole_on_first(name, here.get(name), dtype)
                if whole is not None:
                    found[name] = whole
        return found

    def _whole_on_first(self, name: str, part: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        piece = self.pieces[name]
        whole = None if part is None else piece.join(part, self.ranks).to(dtype)
        found = self.ranks.to_first(whole, torch.empty(piece.shape, dtype=dtype, device="meta"), piece.stages[0])
        # Gathered on a GPU, a whole model may be more than it has room for.
        return found if found is None or self.ranks.size == 1 else found.cpu()

    def collect(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Every weight, whole, on the first rank."""
        parts = {**self.frozen, **self.master}
        return self.on_first({name: parts.get(name) for name in self.pieces}, dtype)

    def collect_gradients(self) -> dict[str, torch.Tensor]:
        """Every reduced gradient, whole, on the first rank."""
        gradients = self.gradients
        return self.on_first({name: gradients.get(name) for name, piece in self.pieces.items() if piece.trained})

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All of the model is here: inside, forward passes need no other rank."""
        yield

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model, after an update or a load."""
        for name, parameter in self._computed.items():
            if parameter is not self.master[name]:
                parameter.copy_(self.master[name])


def _gradient(master: torch.nn.Parameter) -> torch.Tensor:
    assert master.grad is not None, "a gradient buffer is cleared, never dropped"
    return master.grad
