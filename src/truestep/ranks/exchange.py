"""Exchange of tokens between ranks, with their gradients.

Between attention and MLP, each of a group's ranks has a run of the micro-batch's tokens; inside them each has all
tokens and a part of the computation. While tensor ranks sample, each has all tokens everywhere (`TokenExchange`).

Dimensions: S tokens of the micro-batch, R ranks, H hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from truestep.gpu.self_test import serves
from truestep.ranks import peers

# The names since torch 2.13; before it, those of the older functions.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def transfer(
    tensor: torch.Tensor,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor | None],
) -> torch.Tensor:
    """Apply `there` to a tensor, and `back` to its gradient; None: the tensor is to get none."""
    transferred: torch.Tensor = _Transfer.apply(tensor, there, back)
    return transferred


class _Transfer(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, tensor: torch.Tensor, there: Any, back: Any) -> torch.Tensor:
        saved.back = back
        return there(tensor)

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        return saved.back(gradient), None, None


def gather_tokens(own_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [1, S/R, H] -> [1, S, H]
    """Gather all tokens, for a computation of which every rank does a part: gradients are summed."""
    return transfer(own_tokens, partial(_gathered, group=group), partial(_summed, group=group))


def sum_to_own_tokens(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [1, S, H] -> [1, S/R, H]
    """Sum what every rank computed, and keep this rank's tokens of it."""
    return transfer(parts, partial(_summed, group=group), partial(_gathered, group=group))


class TokenExchange:
    """What tensor ranks exchange before and after each half of a layer.

    In training a rank has its own tokens between halves: norms and residual sums are computed, and kept, once. While
    sampling, a rank has all tokens: they are few and nothing of them is kept, their number need not be a multiple of
    the ranks, and one exchange takes the place of two. The model's code is the same for both."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._everywhere = False
        self._peers: peers.Peers | None = None

    def connect(self, place: torch.device, dtype: torch.dtype) -> None:
        """Have GPUs of one machine read small exchanges from each other's memory, where that is right on all of them.
        All ranks call it together."""

        def right() -> str | None:
            self._peers = peers.connect(self.group, place)
            return peers.check(self._peers, self.group, place, dtype)

        if not least(serves("memory that the ranks' GPUs share", "NCCL does", right), place, self.group):
            self._peers = None

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Have every rank keep all tokens, inside: nothing has a gradient there."""
        before, self._everywhere = self._everywhere, True
        try:
            yield
        finally:
            self._everywhere = before

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give a half all tokens."""
        return tokens if self._everywhere else gather_tokens(tokens, self.group)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum what every rank computed in a half, of the tokens that this rank keeps."""
        return self._sum_everywhere(parts) if self._everywhere else sum_to_own_tokens(parts, self.group)

    @torch.compiler.disable  # compiled layers call it
    def _sum_everywhere(self, parts: torch.Tensor) -> torch.Tensor:  # [..., S, H]
        """Sum what every rank computed, to the same bits on each: all add up the same parts in the same order."""
        if self._peers is not None and self._peers.sums(parts):
            return self._peers.sum(parts)
        gathered = gather_parts(parts, self.group)
        return gathered.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)

    def gather_parts(self, part: torch.Tensor) -> torch.Tensor:  # [...] -> [R, ...]
        """Gather a few numbers of every rank."""
        if self._peers is not None and self._peers.takes(part):
            return self._peers.gather(part)
        return gather_parts(part, self.group)


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [...] -> [R, ...]
    """Gather a tensor of one shape from every rank, without gradients."""
    gathered = part.new_empty(dist.get_world_size(group), *part.shape)
    all_gather(gathered.view(-1), part.contiguous().view(-1), group=group)
    return gathered


def least(value: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """Find the least of the ranks' values, on every rank."""
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return int(values)


def gather_same(own_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [S/R, H] -> [S, H]
    """Gather all tokens, for a computation that every rank does alike: each takes its own tokens' gradient."""
    return transfer(own_tokens, partial(_gathered, group=group), partial(_own, group=group))


def _own(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return tokens.chunk(dist.get_world_size(group), -2)[dist.get_rank(group)]


def _gathered(own_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    own_tokens = own_tokens.contiguous()
    tokens, hidden = own_tokens.shape[-2:]
    all_tokens = own_tokens.new_empty(*own_tokens.shape[:-2], tokens * dist.get_world_size(group), hidden)
    all_gather(all_tokens.view(-1, hidden), own_tokens.view(-1, hidden), group=group)
    return all_tokens


def _summed(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    parts = parts.contiguous()
    tokens, hidden = parts.shape[-2:]
    shape = (*parts.shape[:-2], tokens // ranks, hidden)
    flat = parts.view(-1, hidden)
    if parts.dtype in (torch.float32, torch.float64):
        own_tokens = flat.new_empty(tokens // ranks, hidden)
        reduce_scatter(own_tokens, flat, group=group)
        return own_tokens.view(shape)
    # Half precision would be rounded at every addition: as many bytes are sent, and added up in float32 here.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    return received.view(ranks, tokens // ranks, hidden).sum(0, dtype=torch.float32).to(parts.dtype).view(shape)
