"""The head with its weight sharded over the vocabulary: the collectives between ranks.

Each rank computes the statistics of its own slice of the vocabulary. Ranks then exchange three numbers per row, from
which each rank computes the statistics of the whole vocabulary. Logits are exchanged only for sampling (`whole`).

Dimensions: C rows of a chunk, R ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from truestep.head.logits import Rows
from truestep.head.passes import Gradient, HeadPasses
from truestep.ranks.axes import largest_slice
from truestep.ranks.exchange import gather_parts, least
from truestep.types import Coefficients, RowStatistics


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the weight that this rank holds: `size` rows, starting at `first`."""

    group: dist.ProcessGroup
    first: int
    size: int

    def owns(self, label_ids: torch.Tensor) -> torch.Tensor:  # [C] bool
        return (label_ids >= self.first) & (label_ids < self.first + self.size)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of the hidden states over ranks, in place. Each rank has a partial sum."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def least(self, value: int, device: torch.device) -> int:
        """Return the smallest of the ranks' values, on every rank."""
        return least(value, device, self.group)

    def whole(self, own: torch.Tensor, vocabulary: int) -> torch.Tensor:  # [C, size] -> [C, V]
        """Gather the logits of the whole vocabulary on every rank."""
        most = largest_slice(vocabulary, dist.get_world_size(self.group))
        joined = own.new_empty(len(own), vocabulary)
        for number, part in enumerate(gather_parts(pad(own, (0, most - own.shape[1])), self.group)):
            columns = joined[:, number * most : (number + 1) * most]
            columns.copy_(part[:, : columns.shape[1]])
        return joined


@dataclass(frozen=True)
class ShardedPasses:
    local: HeadPasses
    shard: VocabularyShard

    @property
    def bytes_per_logit(self) -> int:
        return self.local.bytes_per_logit

    def forward(self, rows: Rows, keep: bool) -> tuple[Any, RowStatistics]:
        kept, own = self.local.forward(self._local(rows), keep)
        return kept, _join(own, self.shard.owns(rows.label_ids), self.shard.group)

    def gradient(self, kept: Any, statistics: RowStatistics, rows: Rows, coefficients: Coefficients) -> Gradient:
        # p is right, since the statistics cover the whole vocabulary. The label's term belongs to the rank with the
        # label's row.
        local = replace(coefficients, c=torch.where(self.shard.owns(rows.label_ids), coefficients.c, 0))
        return self.local.gradient(kept, statistics, self._local(rows), local)

    def _local(self, rows: Rows) -> Rows:
        """Make label ids relative to this slice. Labels of other slices become 0 and are masked later."""
        label_ids = torch.where(self.shard.owns(rows.label_ids), rows.label_ids - self.shard.first, 0)
        return replace(rows, label_ids=label_ids)


def _join(own: RowStatistics, owned: torch.Tensor, group: dist.ProcessGroup) -> RowStatistics:
    """Compute the statistics of the whole vocabulary from those of each slice."""
    label_logit = torch.where(owned, own.logprobs + own.logsumexp, -torch.inf)
    packed = torch.stack([own.logsumexp, own.entropy, label_logit])  # [3, C]
    gathered = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, packed, group=group)
    logsumexps, entropies, label_logits = torch.stack(gathered, dim=1)  # each [R, C]
    logsumexp = logsumexps.logsumexp(0)
    # Over slice r, which has probability w, p · log p sums to -w · (H_r + logsumexp - logsumexp_r).
    behind = logsumexp - logsumexps
    entropy = ((-behind).exp() * (entropies + behind)).sum(0)
    return RowStatistics(label_logits.amax(0) - logsumexp, entropy, logsumexp)
