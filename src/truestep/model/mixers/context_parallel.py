"""A micro-batch's tokens divided over ranks: each embeds and runs its own, and attention sees them all.

Before attention, tokens are exchanged for heads: a rank sends its tokens for other ranks' heads and receives all tokens
for its own. So the same attention serves everywhere: whole documents, and here some of the heads.

Dimensions: C ranks; S tokens of the micro-batch, S/C of them here; Q query heads, K key-value heads, E head size.
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
    """The ranks that have a run of tokens each; `rank` is this one's number among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(ranks: Ranks) -> "Context | None":
        group = ranks.group("context")
        return None if group is None else Context(group, ranks.place_on("context"), ranks.context)

    def run(self, tokens: int) -> slice:
        """Find the micro-batch's tokens that are here."""
        each = tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def exchange(
        self, rows: torch.Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Send each rank so many rows, or an equal share, and receive others in order of rank."""
        return transfer(
            rows,
            lambda sent: _all_to_all(sent, send, receive, self.group),
            lambda gradient: _all_to_all(gradient, receive, send, self.group),
        )

    def tokens_for_heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give [S/C, Q, E] and twice [S/C, K, E] for [S, Q/C, E] and the keys and values that those heads need."""
        needed = heads_needed(q.shape[1], k.shape[1], self.size)
        if needed != tuple(range(k.shape[1])):
            index = _index(needed, k.device)
            k, v = repeat(k, index, 1), repeat(v, index, 1)
        # One message to each rank: its heads of all three, side by side.
        parts = [tensor.unflatten(1, (self.size, -1)).transpose(0, 1) for tensor in (q, k, v)]  # [C, S/C, heads, E]
        sent = torch.cat([part.flatten(2) for part in parts], dim=-1)
        received = self.exchange(sent).flatten(0, 1)
        q, k, v = (
            flat.unflatten(-1, part.shape[2:])
            for flat, part in zip(received.split([part[0, 0].numel() for part in parts], dim=-1), parts, strict=True)
        )
        return q, k, v

    def heads_for_tokens(self, attended: torch.Tensor) -> torch.Tensor:  # [S, Q/C, E] -> [S/C, Q, E]
        return self.exchange(attended.unflatten(0, (self.size, -1))).transpose(0, 1).flatten(1, 2)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values over the ranks, in place; all ranks have as many."""
        if values.numel():
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:  # [...] -> [C, ...]
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self.group)
        return torch.stack(parts)


@cache
def heads_needed(queries: int, keys: int, size: int) -> tuple[int, ...]:
    """List the key-value heads that go to each rank for its query heads, as many to each, rank by rank: one for each
    query head where a rank's queries would need them in unequal numbers."""
    check_heads(queries, size)
    share, group = queries // size, queries // keys
    each = [[head // group for head in range(rank * share, (rank + 1) * share)] for rank in range(size)]
    if share % group == 0 or group % share == 0:
        each = [sorted(set(heads)) for heads in each]
    return tuple(head for heads in each for head in heads)


def check_heads(queries: int, size: int, tensor: int = 1) -> None:
    """Refuse heads that context ranks cannot share. Heads that tensor ranks do not divide are refused with the plan."""
    if queries % tensor == 0 and queries // tensor % size:
        left = f" of each of the {tensor} tensor ranks" if tensor > 1 else ""
        raise ModelError(
            f"parallel.context: {size} does not divide the model's {queries // tensor} query heads{left}: each rank "
            f"attends with a share of them; choose a divisor of {queries // tensor}"
        )


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
