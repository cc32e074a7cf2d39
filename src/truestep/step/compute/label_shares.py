"""The labels of a micro-batch, divided evenly among the ranks that share its tokens (context parallelism).

Labels are not spread evenly over tokens, since prompts have none. If each rank kept the labels of its own tokens, ranks
with few labels would wait for ranks with many. Instead each rank's head gets an equal share of the labels, in order.
The hidden states that predict them are exchanged between ranks, and their gradients are sent back.

Dimensions: C ranks, S tokens of the micro-batch, T its labels, D its documents, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from truestep.losses.labels import DocumentReducer, Labels, no_reduction
from truestep.model.mixers.context_parallel import Context
from truestep.types import PackedBatch, PackedLabels, PackedTokens, RowStatistics, sent


@dataclass(frozen=True)
class TokenRuns:
    """How many labels of each document a share has."""

    lead: int  # labels of the document that begins in an earlier rank's share; 0: none
    whole: tuple[int, ...]  # labels of each document that is entirely in this share
    tail: int  # labels of the document that continues in a later rank's share; 0: none


@dataclass(frozen=True)
class LabelShare:
    """The labels that this rank's head computes. Without context parallelism these are all labels of the
    micro-batch."""

    num_labels: int  # T
    own: slice  # this rank's share of T
    predicted: torch.Tensor | None = None  # indices into T: the labels predicted from this rank's tokens
    first_token: int = 0
    send: tuple[int, ...] = ()  # rows to send to each rank
    receive: tuple[int, ...] = ()  # rows to receive from each rank
    # The index of each label of this share among the received rows; None: the rows are already in order. If documents
    # share a prefix they are not in order, because the rows of a prefix come before those of all its continuations.
    order: torch.Tensor | None = None
    context: Context | None = None

    @staticmethod
    def of(batch: PackedBatch, context: Context | None) -> "LabelShare":
        """Compute this rank's share of a batch, which must be on the host. `context` None: no context parallelism."""
        labels, tokens = len(batch.labels), len(batch.tokens)
        if context is None:
            return LabelShare(labels, slice(0, labels))
        rank_of = batch.labels.rows // (tokens // context.size)  # the rank whose tokens predict each label
        shares = _even_shares(labels, context.size)
        own, predicted = shares[context.rank], torch.nonzero(rank_of == context.rank)[:, 0]
        bounds = torch.searchsorted(predicted, torch.tensor([0, *(share.stop for share in shares)])).tolist()
        senders = rank_of[own]
        in_order = bool((senders[1:] >= senders[:-1]).all())
        return LabelShare(
            labels,
            own,
            predicted,
            context.run(tokens).start,
            send=tuple(end - start for start, end in pairwise(bounds)),
            receive=tuple(torch.bincount(senders, minlength=context.size).tolist()),
            order=None if in_order else torch.argsort(torch.argsort(senders, stable=True)),
            context=context,
        )

    def to(self, device: torch.device) -> "LabelShare":
        predicted, order = (None if index is None else sent(index, device) for index in (self.predicted, self.order))
        return replace(self, predicted=predicted, order=order)

    def rows(self, hidden: torch.Tensor, label_rows: torch.Tensor) -> torch.Tensor:
        """Exchange the hidden states of this rank's tokens for those that predict its share. Differentiable."""
        if self.context is None or self.predicted is None:
            return hidden.index_select(0, label_rows)
        own = hidden.index_select(0, label_rows.index_select(0, self.predicted) - self.first_token)
        if not self.num_labels:
            return own
        received = self.context.exchange(own, self.send, self.receive)
        return received if self.order is None else received.index_select(0, self.order)

    def gather(self, statistics: RowStatistics) -> RowStatistics:
        """Gather the statistics of all labels on every rank that shares the micro-batch."""
        if self.context is None or not self.num_labels:
            return statistics
        shares = _even_shares(self.num_labels, self.context.size)
        own = torch.stack([statistics.logprobs, statistics.entropy, statistics.logsumexp])  # [3, share]
        # The gather needs equal sizes; shares differ by at most one label.
        longest = max(share.stop - share.start for share in shares)
        padded = own.new_zeros(3, longest)
        padded[:, : own.shape[1]] = own
        parts = self.context.gather(padded)
        unpadded = [part[:, : share.stop - share.start] for part, share in zip(parts, shares, strict=True)]
        return RowStatistics(*torch.cat(unpadded, dim=1))

    def token_runs(self, document_labels: Sequence[int]) -> TokenRuns:
        """Count the labels of each document in this share, given the counts of the whole micro-batch."""
        lead, tail, whole = 0, 0, []
        for end, count in zip(accumulate(document_labels), document_labels, strict=True):
            part = _overlap(slice(end - count, end), self.own)
            if not part:
                continue
            if end - count < self.own.start:
                lead = part
            elif end > self.own.stop:
                tail = part
            else:
                whole.append(part)
        return TokenRuns(lead, tuple(whole), tail)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch on this rank's device, and this rank's share of its labels."""

    members: tuple[int, ...]  # indices into the plan's sequences
    label_counts: tuple[int, ...]  # number of labels of each of these sequences
    tokens: PackedTokens
    labels: PackedLabels
    weight: torch.Tensor  # [T] float64: one over the denominator of each label
    share: "LabelShare"
    exact: torch.Tensor | None = None  # [T] log-probs that replace the head's

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that predict this rank's share of the labels."""
        return self.share.rows(hidden, self.labels.rows)

    def score(
        self, labels: slice | torch.Tensor, statistics: RowStatistics, reduce_documents: DocumentReducer = no_reduction
    ) -> Labels:
        """Combine some of the labels with their statistics from the head."""
        if self.exact is not None:
            statistics = replace(statistics, logprobs=self.exact[labels])
        return Labels.of(self.labels[labels], statistics, self.weight[labels], reduce_documents)

    def logprobs(self, statistics: RowStatistics) -> torch.Tensor:
        """Return the log-probs of all labels: the exact ones if there are any, else those of the head."""
        return statistics.logprobs if self.exact is None else self.exact


def _even_shares(count: int, parts: int) -> list[slice]:
    return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _overlap(first: slice, second: slice) -> int:
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))
