"""The interface of a policy's weights, wherever they lie."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from truestep.process import progress
from truestep.ranks.group import Ranks, in_buckets
from truestep.weights.pieces import Piece


@dataclass(frozen=True)
class StagePass:
    """A pass of one micro-batch through a stage, for which weights are made ready."""

    layers: slice
    begins: bool  # with the embedding
    ends: bool  # with the head, and what is before it
    final: bool  # no other stage that is here has its backward passes later
    number: int  # of the micro-batch, from 0
    of: int  # micro-batches of the step
    group: int  # micro-batches that share a gathering
    backward: bool  # the step has backward passes

    @property
    def last(self) -> bool:
        return self.number == self.of - 1

    @property
    def last_of_group(self) -> bool:
        return self.last or self.number % self.group == self.group - 1


class Weights(Protocol):
    """Float32 weights and gradients, of which each rank has a part, whatever type the model computes in.

    A weight that is not trained has no master and no gradient: optimizer, clipping and norms never see it. It is kept,
    and saved, in the type that the model computes in.
    """

    ranks: Ranks
    dtype: torch.dtype  # in which the model computes
    pieces: dict[str, Piece]  # of all weights of the uncut model, by name, in its order
    frozen: dict[str, torch.Tensor]  # this rank's part of each weight that is not trained, in `dtype`
    # Masters lie on the host, and what the model computes with is beside them on the device. Then they have no `grad`.
    masters_on_host: bool = False
    _settle: Callable[[], None] = staticmethod(lambda: None)
    _lends: bool = False  # what goes back to the host beside a step has the memory of gradients until these need it
    _masters: dict[str, torch.nn.Parameter]

    @property
    def master(self) -> dict[str, torch.nn.Parameter]:
        """This rank's part of each trained weight; what an optimizer updates."""
        if self.masters_on_host:
            self._settle()
        return self._masters

    def moved_beside(self, settle: Callable[[], None]) -> None:
        """Take what waits until nothing is on its way back to the host: an optimizer lets its states, and masters on
        the host, go back beside other things. Who asks for such masters waits, and so does sampling, for the memory."""
        self._settle, self._lends = settle, True

    def zero_gradients(self) -> None: ...

    def head(self, model: Any) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor | None]]:
        """Give the head's weight in the type of the model, and the float32 buffer of its gradient (None: frozen)."""

    def reduce(self) -> None:
        """Sum the gradients over the ranks; afterwards they are complete, and the same on every rank that holds them.

        It is a plain sum: the denominators are in them already."""

    def publish(self) -> None:
        """Have the model compute with the masters as they are now, after an update or a load."""

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Have what the model computes with of each group of weights lie one behind another in memory, if it stays
        where it is. Values do not change. A group may be named several times. No backward pass may be under way."""
        return

    def computed_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        """Give some rows of the copy that the model computes with, into which a weight's master is rounded; None if it
        has no such copy here."""
        return None

    def computed(self) -> dict[str, torch.Tensor]:
        """Give this rank's part of each trained weight: the copy that the model computes with, else the master."""
        copies = {name: self.computed_rows(name, slice(None)) for name in self._masters}
        return {name: self._masters[name].detach() if copy is None else copy for name, copy in copies.items()}

    def before_forward(self, coming: StagePass) -> None:
        """Make weights ready for a forward pass."""
        return

    def before_backward(self, coming: StagePass) -> None:
        """Make weights ready for a backward pass."""
        return

    def gathered(self) -> AbstractContextManager[None]:
        """Have all of the model here: inside, forward passes need no other rank."""
        self._settle()
        return nullcontext()

    def let_go_of_gathered(self) -> None:
        """Free what is still gathered from other ranks; it is gathered again where it is needed."""
        return

    def shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Take this rank's part of what its shard group has of a tensor of this weight's shape."""
        return piece

    def unshard_on_first(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Join the parts of a shard group on the device of its first rank; its others get nothing. Each of its ranks
        calls this with its parts of the same weights. Who asks for `dtype` may get a wider type, of the same values."""
        return {name: part.to(self.device) for name, part in parts.items()}

    @property
    def device(self) -> torch.device:
        return next(iter((self.master or self.frozen).values())).device

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's part of each trained weight's gradient."""
        found = {name: master.grad for name, master in self.master.items() if master.grad is not None}
        assert len(found) == len(self.master), "every master has a gradient from its first step on"
        return found

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take this rank's part of a tensor of this weight's shape."""
        return self.shard(name, self.pieces[name].slice(tensor, self.ranks))

    @torch.no_grad()
    def on_first(
        self,
        parts: Mapping[str, torch.Tensor | None],
        dtype: torch.dtype = torch.float32,
        widths: Mapping[str, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Join tensors of the weights' shapes on the host of the first rank; the others get nothing. Every rank calls
        this with its parts, in the same order; the part of a weight on another stage is None. A part may lie on the
        host. `widths`: the sizes of last dimensions that are not those of their weights."""
        found = {}
        for names in in_buckets(parts, lambda name: self._piece(name, widths).shape.numel()):
            joined = self.on_device_of_first({name: parts[name] for name in names}, dtype, widths)
            for name, tensor in joined.items():
                # Gathered on a GPU, a whole model may be more than it has room for.
                found[name] = tensor if self.ranks.size == 1 else tensor.cpu()
        return found

    @torch.no_grad()
    def on_device_of_first(
        self,
        parts: Mapping[str, torch.Tensor | None],
        dtype: torch.dtype,
        widths: Mapping[str, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Join tensors as `on_first` does, in one message, and leave them on the first rank's device. Those of another
        stage come over the host, and stay there."""
        found = {}
        # Of a tied embedding, which two stages have, the first one's.
        sent = [name for name in parts if self.ranks.stage == self.pieces[name].stages[0]]
        own = {name: part.detach() for name in sent if (part := parts[name]) is not None}
        here = self.unshard_on_first(own, dtype)
        for name in parts:
            piece = self._piece(name, widths)
            joined = piece.join(here[name], self.ranks).to(dtype) if name in here else None
            like = torch.empty(piece.shape, dtype=dtype, device="meta")
            received = self.ranks.to_first(joined, like, piece.stages[0])
            if received is not None:
                found[name] = received
            progress.made("tensors gathered")
        return found

    def _piece(self, name: str, widths: Mapping[str, int] | None) -> Piece:
        return self.pieces[name].with_width((widths or {}).get(name))

    def collect(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Join every weight on the first rank."""
        parts = {**self.frozen, **self.master}
        return self.on_first({name: parts.get(name) for name in self.pieces}, dtype)

    def collect_gradients(self) -> dict[str, torch.Tensor]:
        """Copy every reduced gradient to the host of the first rank."""
        parts = self.gradients
        joined = self.on_first({name: parts.get(name) for name, piece in self.pieces.items() if piece.trained})
        return {name: whole.to("cpu", copy=True) for name, whole in joined.items()}  # a gradient's memory may be lent


def some_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Give some rows of a tensor: itself, if they are all of them."""
    # There are hundreds of weights, and a GPU waits while the host makes as many views of each.
    return tensor if not tensor.ndim or (rows.start == 0 and rows.stop == tensor.shape[0]) else tensor[rows]
