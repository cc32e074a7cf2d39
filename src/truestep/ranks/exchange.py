"""Exchange of tokens between ranks, with their gradients (sequence parallelism).

Between attention and MLP, each rank of a group has consecutive tokens of the micro-batch; inside them each rank has all
tokens and a slice of the weights. While tensor ranks sample, each has all tokens everywhere (`TokenExchange`).

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

# The names since torch 2.13, else the older ones.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def transfer(
    tensor: torch.Tensor,
    there: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor | None],
) -> torch.Tensor:
    """Apply `there` to a tensor in the forward pass, and `back` to its gradient. If `back` returns None, there is no
    gradient."""
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
    """All-gather tokens for a computation that is split over the ranks. Gradients are reduce-scattered."""
    return transfer(own_tokens, partial(_gathered, group=group), partial(_summed, group=group))


def sum_to_own_tokens(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [1, S, H] -> [1, S/R, H]
    """Reduce-scatter the ranks' partial results: return the sum for this rank's tokens. Gradients are all-gathered."""
    return transfer(parts, partial(_summed, group=group), partial(_gathered, group=group))


class TokenExchange:
    """Communication of tensor ranks before and after attention and MLP.

    In training a rank keeps its own tokens between them, so that norms and residual sums are computed and stored once.
    In sampling a rank keeps all tokens: they are few, no activations are stored, their number need not be a multiple of
    the ranks, and one all-reduce replaces two exchanges. The model's code is the same for both."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._everywhere = False
        self._peers: peers.Peers | None = None

    def connect(self, place: torch.device, dtype: torch.dtype) -> None:
        """Let GPUs of one machine exchange small tensors through each other's memory, if a test of that succeeds on all
        ranks. All ranks call this together."""

        def right() -> str | None:
            self._peers = peers.connect(self.group, place)
            return peers.check(self._peers, self.group, place, dtype)

        if not least(serves("memory that the ranks' GPUs share", "NCCL is used", right), place, self.group):
            self._peers = None

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Keep all tokens on every rank inside the block, for sampling without gradients."""
        before, self._everywhere = self._everywhere, True
        try:
            yield
        finally:
            self._everywhere = before

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return all tokens, as the input of attention or MLP."""
        return tokens if self._everywhere else gather_tokens(tokens, self.group)

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Select the tokens that this rank keeps."""
        return tokens if self._everywhere else _own(tokens, self.group)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial results of attention or MLP, for the tokens that this rank keeps."""
        return self._sum_everywhere(parts) if self._everywhere else sum_to_own_tokens(parts, self.group)

    @torch.compiler.disable  # compiled layers call it
    def _sum_everywhere(self, parts: torch.Tensor) -> torch.Tensor:  # [..., S, H]
        """All-reduce the ranks' partial results. All ranks add in the same order, so that they get the same bits."""
        if self._peers is not None and self._peers.sums(parts):
            return self._peers.sum(parts)
        gathered = gather_parts(parts, self.group)
        return gathered.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)

    def gather_parts(self, part: torch.Tensor) -> torch.Tensor:  # [...] -> [R, ...]
        """All-gather a small tensor, without gradients."""
        if self._peers is not None and self._peers.takes(part):
            return self._peers.gather(part)
        return gather_parts(part, self.group)


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [...] -> [R, ...]
    """All-gather a tensor that has the same shape on every rank, without gradients."""
    gathered = part.new_empty(dist.get_world_size(group), *part.shape)
    all_gather(gathered.view(-1), part.contiguous().view(-1), group=group)
    return gathered


def least(value: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """Return the minimum of the ranks' values, on every rank."""
    values = torch.tensor(value, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return int(values)


def gather_same(own_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # [S/R, H] -> [S, H]
    """All-gather tokens for a computation that every rank repeats. Each rank takes the gradient of its own tokens."""
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
    # A reduce-scatter would round to half precision at every addition. An all-to-all sends as many bytes, and the sum
    # is computed in float32 here.
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    return received.view(ranks, tokens // ranks, hidden).sum(0, dtype=torch.float32).to(parts.dtype).view(shape)
