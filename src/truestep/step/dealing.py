"""A micro-batch's labels over the ranks that share its tokens.

Labels lie where prompts do not, so ranks that kept those of their own tokens would wait for one another in the head.
Instead each takes an even share, in order: the rows that predict it are sent to it, and their gradients back.

Dimensions: C ranks, S tokens of the micro-batch, T its labels, D its documents, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from truestep.losses.labels import DocumentReducer, Labels, no_reduction
from truestep.policy.model.context import Context
from truestep.types import PackedBatch, PackedLabels, PackedTokens, RowStatistics


@dataclass(frozen=True)
class Pieces:
    """A share's labels by document: first those of one that begins on a rank before, then of whole documents, and last
    of one that goes on behind."""

    lead: int
    whole: tuple[int, ...]
    tail: int


@dataclass(frozen=True)
class Deal:
    """Which labels this rank's head computes: all of them where no rank shares its tokens."""

    labels: int  # T
    mine: slice  # of T
    here: slice  # of T: those that are predicted from this rank's tokens
    first_token: int = 0
    send: tuple[int, ...] = ()  # rows to each rank
    receive: tuple[int, ...] = ()  # and from each
    context: Context | None = None

    @staticmethod
    def of(batch: PackedBatch, context: Context | None) -> Deal:
        """Deal the labels of a batch that is on the host."""
        labels, tokens = len(batch.labels), len(batch.tokens)
        if context is None:
            return Deal(labels, slice(0, labels), slice(0, labels))
        # A label's row never lies before the one of the label before it, so each rank's tokens predict a run of labels.
        runs = torch.arange(context.size + 1) * (tokens // context.size)
        bounds = torch.searchsorted(batch.labels.rows, runs).tolist()
        predicted = [slice(*pair) for pair in pairwise(bounds)]
        shares = _even(labels, context.size)
        here, mine = predicted[context.rank], shares[context.rank]
        return Deal(
            labels,
            mine,
            here,
            context.run(tokens).start,
            tuple(_overlap(here, share) for share in shares),
            tuple(_overlap(run, mine) for run in predicted),
            context,
        )

    def rows(self, hidden: torch.Tensor, label_rows: torch.Tensor) -> torch.Tensor:
        """From the hidden states of the tokens that are here, those that predict this rank's labels. With a graph."""
        if self.context is None:
            return hidden.index_select(0, label_rows)
        known = hidden.index_select(0, label_rows[self.here] - self.first_token)
        return self.context.exchange(known, self.send, self.receive) if self.labels else known

    def gather(self, statistics: RowStatistics) -> RowStatistics:
        """Of all labels, from every rank's of its share."""
        if self.context is None or not self.labels:
            return statistics
        shares = _even(self.labels, self.context.size)
        mine = torch.stack([statistics.logprobs, statistics.entropy, statistics.logsumexp])  # [3, share]
        # An exchange of equal parts: shares differ by one label at most.
        longest = max(share.stop - share.start for share in shares)
        padded = mine.new_zeros(3, longest)
        padded[:, : mine.shape[1]] = mine
        parts = self.context.gather(padded)
        everyone = [part[:, : share.stop - share.start] for part, share in zip(parts, shares, strict=True)]
        return RowStatistics(*torch.cat(everyone, dim=1))

    def pieces(self, document_labels: Sequence[int]) -> Pieces:
        """This rank's labels by document, given the number of labels of each of the micro-batch's documents."""
        lead, tail, whole = 0, 0, []
        for end, count in zip(accumulate(document_labels), document_labels, strict=True):
            document = slice(end - count, end)
            part = _overlap(document, self.mine)
            if not part:
                continue
            if document.start < self.mine.start:
                lead = part
            elif document.stop > self.mine.stop:
                tail = part
            else:
                whole.append(part)
        return Pieces(lead, tuple(whole), tail)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on this rank's device, and which of its labels this rank's head computes."""

    members: tuple[int, ...]  # indices into the plan's documents
    label_counts: tuple[int, ...]  # of each of those documents
    tokens: PackedTokens
    labels: PackedLabels
    weight: torch.Tensor  # [T] float64: one over the step's denominator, for each label
    deal: Deal

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states that predict this rank's labels."""
        return self.deal.rows(hidden, self.labels.rows)

    def score(
        self, labels: slice | torch.Tensor, statistics: RowStatistics, reduce_documents: DocumentReducer = no_reduction
    ) -> Labels:
        """Some of the labels, with what the head says of them."""
        return Labels.of(self.labels[labels], statistics, self.weight[labels], reduce_documents)


def _even(count: int, parts: int) -> list[slice]:
    return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _overlap(first: slice, second: slice) -> int:
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))
