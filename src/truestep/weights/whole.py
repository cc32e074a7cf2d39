"""Weights that are not sharded. Gradients are all-reduced over the ranks once per step.

A float32 model's parameters are its master weights. A bfloat16 model has separate float32 masters. Each micro-batch's
gradient is added to a float32 buffer immediately, and each update rounds the masters into the model's weights once.

A step's first gradient overwrites the buffer. So only the buffers of embedding and head are zeroed, since these get
gradients by rows or chunks. If optimizer states are on the host, a buffer has no memory until its first gradient; until
then, states in flight to the host use the memory. Masters on the host are separate in any dtype; model and gradients
stay on the device.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from truestep.gpu.pinned import to_host
from truestep.ranks.group import ALONE, Ranks
from truestep.weights.gradient_buffers import aligned, runs_of
from truestep.weights.pieces import WeightSlice, pieces_of, sum_parts
from truestep.weights.protocol import Weights, some_rows


class WholeWeights(Weights):
    """Makes a model with float32 weights compute in `dtype`, and keeps its masters and gradients."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
        pieces: dict[str, WeightSlice] | None = None,
        *,
        masters_on_host: bool = False,
    ):
        """Take over a model. If it is cut, `pieces` describes all weights of the uncut model, in its order of
        weights."""
        self.ranks, self.dtype, self.masters_on_host = ranks, dtype, masters_on_host
        self.pieces = pieces or pieces_of(model)
        self._masters, self.frozen = {}, {}
        self._computed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # model parameter -> master
        self._buffers: dict[torch.nn.Parameter, torch.Tensor] = {}  # model parameter -> float32 gradient
        # parameters without a gradient in this step; their buffers hold old values
        self._fresh: set[torch.nn.Parameter] = set()
        self._by_name: dict[str, torch.nn.Parameter] = {}  # trained model parameters
        # `named_parameters` yields a tied tensor once, under its first name: the input embedding's.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                master = self._master_of(parameter)
                gradient = torch.zeros_like(parameter)  # the same object in all steps
                if not masters_on_host:
                    master.grad = gradient
                self._buffers[parameter], self._by_name[name] = gradient, parameter
                self._masters[name] = self._computed[parameter] = master
                if master is not parameter:
                    # A weak reference, because the garbage collector does not find cycles through a parameter's hooks.
                    parameter.register_post_accumulate_grad_hook(partial(_move_gradient, weakref.ref(self)))
            # Only parameters are converted; buffers such as rotary frequencies stay float32, as in transformers.
            parameter.data = parameter.data.to(dtype)
            if not parameter.requires_grad:
                self.frozen[name] = parameter

    def _master_of(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if self.masters_on_host:
            return torch.nn.Parameter(to_host(parameter.detach()))
        return parameter if parameter.dtype == self.dtype else torch.nn.Parameter(parameter.detach())

    @property
    def device(self) -> torch.device:
        return next(iter([*self._by_name.values(), *self.frozen.values()])).device

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._filled(parameter) for name, parameter in self._by_name.items()}

    def gradient_of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the float32 gradient buffer of a model's parameter; None if it is frozen."""
        return self._filled(parameter) if parameter in self._buffers else None

    @torch.no_grad()
    def add_to_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient to the buffer of a model's parameter."""
        buffer = self._buffers[parameter]
        if self._is_first(parameter):
            buffer.copy_(gradient)
        else:
            buffer.add_(gradient)

    @property
    def rounded(self) -> tuple[torch.nn.Parameter, ...]:
        """The model's parameters that have separate masters."""
        return tuple(parameter for parameter, master in self._computed.items() if parameter is not master)

    @torch.no_grad()
    def add_product(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rows: torch.Tensor) -> None:
        buffer = self._buffers[parameter]
        if not buffer.is_cuda:  # CPU products cannot add to a buffer of another type
            self.add_to_gradient(parameter, gradient.T @ rows)
        elif self._is_first(parameter):
            torch.mm(gradient.T, rows, out_dtype=buffer.dtype, out=buffer)
        else:
            torch.addmm(buffer, gradient.T, rows, out_dtype=buffer.dtype, out=buffer)

    @torch.no_grad()
    def add_grouped(
        self, parameter: torch.nn.Parameter, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor
    ) -> None:
        """Add products to the matrices [N, K] of a parameter's gradient buffer: for each, its rows of `first` [R, N]
        times its rows of `second` [R, K]."""
        buffer, fresh = self._buffers[parameter], self._is_first(parameter)
        if buffer.is_cuda and first.dtype == second.dtype == torch.bfloat16 and aligned(first, second):
            from truestep.weights.grouped_kernel import add_gradients  # needs Triton

            add_gradients(first, second, ends, buffer, adds=not fresh)
            return
        if fresh:
            buffer.zero_()
        for matrix, run in runs_of(ends):  # convert first: half-precision products cannot be added to a float32 buffer
            buffer[matrix].addmm_(first[run].T.to(buffer.dtype), second[run].to(buffer.dtype))

    @torch.no_grad()
    def add_sum(self, parameter: torch.nn.Parameter, parts: torch.Tensor) -> None:
        from truestep.weights.sum_kernel import add_up  # needs Triton

        add_up(parts, self._buffers[parameter], adds=not self._is_first(parameter))

    @torch.no_grad()
    def add_rows(self, parameter: torch.nn.Parameter, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add gradients [T, H] to rows [T] of a parameter's gradient buffer. Rows may repeat."""
        buffer, gradients = self._filled(parameter), gradients.to(torch.float32)
        if buffer.is_cuda:  # deterministic: on CUDA, index_put_ sorts the rows
            buffer.index_put_((rows,), gradients, accumulate=True)
        else:  # on a CPU, index_put_ adds in any order
            buffer.index_add_(0, rows, gradients)

    def zero_gradients(self) -> None:
        kept = []
        for parameter, buffer in self._buffers.items():
            if self._computed[parameter] is parameter:  # autograd accumulates into the buffer
                kept.append(buffer)
                continue
            self._fresh.add(parameter)
            if self._lends:
                buffer.untyped_storage().resize_(0)
        if kept:
            torch._foreach_zero_(kept)

    def _is_first(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether the next gradient is the parameter's first in this step. Allocate the buffer's memory if
        needed."""
        buffer = self._buffers[parameter]
        if not buffer.untyped_storage().nbytes():
            buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)
        first = parameter in self._fresh
        self._fresh.discard(parameter)
        return first

    @torch.no_grad()
    def _filled(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return a parameter's gradient buffer, zeroed if it has no gradient in this step."""
        buffer = self._buffers[parameter]
        return buffer.zero_() if self._is_first(parameter) else buffer

    @contextmanager
    def head(self, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        weight = model.get_output_embeddings().weight
        yield weight.detach(), self.gradient_of(weight)

    @torch.no_grad()
    def reduce(self) -> None:
        # Sum over the ranks that have the same weights and other tokens.
        self.ranks.sum_all("replicate", list(self.gradients.values()))
        sum_parts(self.ranks, self.pieces, self.gradients)

    @torch.no_grad()
    def publish(self) -> None:
        if rounded := self.rounded:
            torch._foreach_copy_(rounded, [self._computed[parameter] for parameter in rounded])

    @torch.no_grad()
    def lay_together(self, groups: Iterable[Sequence[torch.Tensor]]) -> None:
        if self.shared:  # other models' CUDA graphs contain the addresses of the weights
            return
        every = {**self.frozen, **self._by_name}
        names = {parameter.data_ptr(): name for name, parameter in every.items()}
        for group in groups:
            found = [names.pop(weight.data_ptr(), "") for weight in group]
            if not all(found):
                continue  # the group was passed before, or shares a weight with an earlier group
            joined = torch.cat([every[name] for name in found])
            # Also copy other weights in the old group's storage: they would keep all of that storage alive.
            parts = [every[name] for name in found]
            left = {_memory(part) for part in parts if part.untyped_storage().nbytes() > part.nbytes}
            staying = [name for name in every if left and name not in found and _memory(every[name]) in left]
            for name, part in zip(found, joined.split([len(every[name]) for name in found]), strict=True):
                every[name].data = part
            for name in staying:
                known = names.pop(every[name].data_ptr(), "")
                every[name].data = every[name].detach().clone()
                names[every[name].data_ptr()] = known

    def computed(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._by_name.items()}

    def computed_rows(self, name: str, rows: slice) -> torch.Tensor | None:
        own = self._by_name[name]
        return None if self._masters[name] is own else some_rows(own.detach(), rows)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _move_gradient(weights: Callable[[], WholeWeights | None], parameter: torch.Tensor) -> None:
    owner = weights()
    assert owner is not None, "the weights of this model are gone"
    assert isinstance(parameter, torch.nn.Parameter)
    if parameter.grad is not None:  # None: a kernel has already added the gradient to the buffer
        owner.add_to_gradient(parameter, parameter.grad)
        parameter.grad = None
