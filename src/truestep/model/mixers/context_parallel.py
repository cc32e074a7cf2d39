"""Context parallelism: a micro-batch's tokens divided over ranks. Each rank runs the layers on its own tokens.

Before attention, an all-to-all exchanges tokens for heads: a rank then has all tokens for a share of the heads, so the
attention over whole documents is the same code as on one rank.

Dimensions: C ranks; S tokens of the micro-batch, S/C of them on a rank; Q query heads, K key-value heads, E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from truestep.model.fast.gather_rows import repeat
from truestep.ranks.exchange import transfer
from truestep.ranks.group import Ranks
from truestep.weights.errors import ModelError


@dataclass(frozen=True)
class Context:
    """The ranks that share a micro-batch's tokens; each has a contiguous part. `rank` is this rank's index in the
    group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(ranks: Ranks) -> "Context | None":
        group = ranks.group("context")
        return None if group is None else Context(group, ranks.place_on("context"), ranks.context)

    def run(self, tokens: int) -> slice:
        """Return the slice of the micro-batch's tokens that this rank has."""
        each = tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def exchange(
        self, rows: torch.Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send `send[i]` rows (None: an equal share) to rank i, and receive `receive[i]` rows from it: all-to-all."""
        return transfer(
            rows,
            lambda sent: _all_to_all(sent, send, receive, self.group),
            lambda gradient: _all_to_all(gradient, receive, send, self.group),
        )

    def tokens_for_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange q [S/C, Q, E] and k, v [S/C, K, E] for q [S, Q/C, E] and the keys and values of its heads."""
        needed = heads_needed(q.shape[1], k.shape[1], self.size)
        if needed != tuple(range(k.shape[1])):
            index = _index(needed, k.device)
            k, v = repeat(k, index, 1), repeat(v, index, 1)
        q, k, v = self.tokens_for_shares(q, k, v)
        return q, k, v

    def tokens_for_shares(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange tensors [S/C, N, ...] for [S, N/C, ...]: all tokens of this rank's share of heads or channels."""
        # One message to each rank: its share of all tensors, concatenated.
        parts = [tensor.unflatten(1, (self.size, -1)).transpose(0, 1) for tensor in tensors]  # [C, S/C, N/C, ...]
        received = self.exchange(torch.cat([part.flatten(2) for part in parts], dim=-1)).flatten(0, 1)
        return tuple(
            flat.unflatten(-1, part.shape[2:])
            for flat, part in zip(received.split([part[0, 0].numel() for part in parts], dim=-1), parts, strict=True)
        )

    def own_heads(self, values: torch.Tensor) -> torch.Tensor:  # [Q, ...] -> [Q/C, ...]
        """Return the values of this rank's query heads."""
        return values.unflatten(0, (self.size, -1))[self.rank]

    def heads_for_tokens(self, attended: torch.Tensor) -> torch.Tensor:  # [S, Q/C, E] -> [S/C, Q, E]
        return self.exchange(attended.unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce values of equal shape over the context ranks, in place."""
        if values.numel():
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:  # [...] -> [C, ...]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)


@cache
def heads_needed(queries: int, keys: int, size: int) -> tuple[int, ...]:
    """List the key-value heads to send to each rank, in the order of ranks, equally many to each. If a rank's query
    heads share key-value heads unevenly, a key-value head is sent once per query head."""
    check_heads(queries, size)
    share, group = queries // size, queries // keys
    each = [[head // group for head in range(rank * share, (rank + 1) * share)] for rank in range(size)]
    if share % group == 0 or group % share == 0:
        each = [sorted(set(heads)) for heads in each]
    return tuple(head for heads in each for head in heads)


def check_heads(queries: int, size: int, tensor: int = 1) -> None:
    """Refuse a number of query heads that the number of context ranks does not divide. `tensor_plan` does the same for
    tensor ranks."""
    if queries % tensor == 0 and queries // tensor % size:
        left = f" of each of the {tensor} tensor ranks" if tensor > 1 else ""
        raise ModelError(
            f"parallel.context: {size} does not divide the model's {queries // tensor} query heads{left}: each rank "
            f"attends with a share of them; choose a divisor of {queries // tensor}"
        )


def check_share(what: str, count: int, size: int) -> None:
    """Refuse a number of heads or channels of a recurrent layer that the number of context ranks does not divide."""
    if count % size:
        raise ModelError(f"parallel.context: {size} does not divide the {count} {what}: choose a divisor of {count}")


@cache
def _index(heads: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(heads, device=device)


def _all_to_all(
    rows: torch.Tensor, send: Sequence[int] | None, receive: Sequence[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    received = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
    dist.all_to_all_single(
        received,
        rows.contiguous(),
        output_split_sizes=None if receive is None else list(receive),
        input_split_sizes=None if send is None else list(send),
        group=group,
    )
    return received
