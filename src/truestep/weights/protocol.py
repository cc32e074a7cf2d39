"""The interface of a policy's weights, whole or sharded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from truestep.process import progress
from truestep.ranks.group import Ranks, in_buckets
from truestep.weights.pieces import WeightSlice


@dataclass(frozen=True)
class StagePass:
    """One micro-batch's pass through a pipeline stage."""

    layers: slice
    begins: bool  # whether the stage has the embedding
    ends: bool  # whether the stage has the final norm and the head
    final: bool  # whether no other stage of this rank has later backward passes
    number: int  # the micro-batch's index in the step
    of: int  # number of micro-batches in the step
    group: int  # micro-batches per all-gather of the weights
    backward: bool  # whether the step has backward passes

    @property
    def last(self) -> bool:
        return self.number == self.of - 1

    @property
    def last_of_group(self) -> bool:
        return self.last or self.number % self.group == self.group - 1


class Weights(Protocol):
    """This rank's part of the float32 master weights and gradients, whatever dtype the model computes in.

    A frozen weight has no master and no gradient, so the optimizer, clipping and norms skip it. It is kept and saved in
    the compute dtype.
    """

    ranks: Ranks
    dtype: torch.dtype  # the dtype in which the model computes
    pieces: dict[str, WeightSlice]  # all weights of the uncut model, by name, in the model's order
    frozen: dict[str, torch.Tensor]  # this rank's part of each frozen weight, in `dtype`
    # Masters are in host memory and have no `grad`. The model computes with a copy on the device.
    masters_on_host: bool = False
    shared: bool = False  # other models use the same frozen weights, so they must not be moved
    _settle: Callable[[], None] = staticmethod(lambda: None)  # waits for copies to the host; see `moved_beside`
    # True: gradient buffers are freed between steps, so that states in flight to the host can use the memory
    _lends: bool = False
    _masters: dict[str, torch.nn.Parameter]

    @property
    def master(self) -> dict[str, torch.nn.Parameter]:
        """This rank's part of each trained weight, in float32. The optimizer updates it."""
        if self.masters_on_host:
            self._settle()
        return self._masters

    def moved_beside(self, settle: Callable[[], None]) -> None:
        """Register `settle`, which waits for the optimizer's asynchronous copies of states and masters to the host.
        `master` calls it before it returns masters on the host. `gathered` calls it before sampling, to free device
        memory."""
        self._settle, self._lends = settle, True

    def zero_gradients(self) -> None: ...

    def head(self, model: Any) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield the head's weight in `dtype`, and its float32 gradient buffer (None: frozen)."""

    def reduce(self) -> None:
        """Reduce the gradients over ranks, so that they are complete and equal on every rank that holds the weight.

        This is a plain sum: the loss is already divided by its denominator."""

    def publish(self) -> None:
        """Copy the masters into the weights that the model computes with. Called after an update or a load."""

    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        """Move the computed weights of each group to contiguous memory. Values do not change. Does nothing if weights
        are sharded. A group may be passed several times. Not allowed during a backward pass."""
        return

    def computed_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        """Return rows of the weight that the model computes with, which is rounded from the master; None if the model
        computes with the master itself."""
        return None

    def computed(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each trained weight that the model computes with: the rounded copy, or the master
        if there is no copy."""
        copies = {name: self.computed_rows(name, slice(None)) for name in self._masters}
        return {name: self._masters[name].detach() if copy is None else copy for name, copy in copies.items()}

    def before_forward(self, coming: StagePass) -> None:
        """Prepare weights for a forward pass."""
        return

    def before_backward(self, coming: StagePass) -> None:
        """Prepare weights for a backward pass."""
        return

    def gathered(self) -> AbstractContextManager[None]:
        """Gather all weights within the block, so that forward passes need no communication between shards."""
        self._settle()
        return nullcontext()

    def let_go_of_gathered(self) -> None:
        """Free weights that were gathered from other ranks. They are gathered again when needed."""
        return

    def shard(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of `piece`, which is the shard group's slice of a tensor in the weight's shape."""
        return piece

    def unshard_on_first(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Join shards on the device of the shard group's first rank; other ranks get nothing. Each rank of the group
        calls this with its parts of the same weights. The result may have a wider type than `dtype`."""
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
        """Return this rank's part of a tensor in the weight's shape."""
        return self.shard(name, self.pieces[name].slice(tensor, self.ranks))

    @torch.no_grad()
    def on_first(
        self,
        parts: Mapping[str, torch.Tensor | None],
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, torch.Tensor]:
        """Join tensors in the weights' shapes on the host of the first rank; other ranks get nothing. Every rank calls
        this with its parts, in the same order; None for weights of other stages. Parts may be on the host."""
        found = {}
        for names in in_buckets(parts, lambda name: self.pieces[name].shape.numel()):
            joined = self.on_device_of_first({name: parts[name] for name in names}, dtype)
            for name, tensor in joined.items():
                # To the host: a whole model may not fit on one GPU.
                found[name] = tensor if self.ranks.size == 1 else tensor.cpu()
        return found

    @torch.no_grad()
    def on_device_of_first(
        self,
        parts: Mapping[str, torch.Tensor | None],
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Join tensors as `on_first` does, in one message, on the first rank's device. Tensors of other stages are sent
        through the host, and stay in host memory."""
        found = {}
        # A tied embedding is on two stages; the first stage sends it.
        sent = [name for name in parts if self.ranks.stage == self.pieces[name].stages[0]]
        own = {name: part.detach() for name in sent if (part := parts[name]) is not None}
        here = self.unshard_on_first(own, dtype)
        for name in parts:
            piece = self.pieces[name]
            joined = piece.join(here[name], self.ranks).to(dtype) if name in here else None
            like = torch.empty(piece.shape, dtype=dtype, device="meta")
            received = self.ranks.to_first(joined, like, piece.stages[0])
            if received is not None:
                found[name] = received
            progress.made("tensors gathered")
        return found

    def collect(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Join every weight on the first rank."""
        parts = {**self.frozen, **self.master}
        return self.on_first({name: parts.get(name) for name in self.pieces}, dtype)

    def collect_gradients(self) -> dict[str, torch.Tensor]:
        """Copy every reduced gradient to the host of the first rank."""
        parts = self.gradients
        joined = self.on_first({name: parts.get(name) for name, piece in self.pieces.items() if piece.trained})
        # a copy, since the buffer's memory may be freed
        return {name: whole.to("cpu", copy=True) for name, whole in joined.items()}


def some_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows of a tensor, or the tensor itself if the rows are all of them."""
    # Avoid needless views: with hundreds of weights they would slow the host down, and the GPU would wait.
    return tensor if not tensor.ndim or (rows.start == 0 and rows.stop == tensor.shape[0]) else tensor[rows]
