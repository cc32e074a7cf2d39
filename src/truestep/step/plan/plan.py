"""The choice of the documents of each step, made on the host from the documents' order alone.

exact    the next `docs_per_step` documents, then packed: the set depends on no budget
packed   the next micro-batches, packed in order, until a rule says stop: their set depends on the budget
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from truestep.rollouts.advantages import STANDARD_DEVIATION_FLOOR, scale_over_step
from truestep.rollouts.packing import balance, fill_in_order
from truestep.rollouts.selection import has_advantage
from truestep.types import Rollout, StepPlan, StepTotals, sequences_of


@dataclass(frozen=True)
class StepRule:
    """The options of `schedule` and `data` that decide what a step is."""

    docs_per_step: int  # 0: a fixed number of micro-batches
    keep_overshoot: bool
    depth_first_micro_batches: int
    breadth_first_micro_batches: int
    tokens_per_microbatch: int
    ranks: int = 1
    advantage_std_floor: float = STANDARD_DEVIATION_FLOOR  # where advantages are scaled over the step
    skip_zero_advantage: bool = False  # documents without an advantage have micro-batches of their own
    even_length: float = math.inf  # at which a document's attention costs as much as its matrix products

    @property
    def multiple(self) -> int:
        """The number of a step's micro-batches is a multiple of this."""
        return self.ranks * self.breadth_first_micro_batches

    def cost(self, length: int) -> float:
        """Estimate the cost of a document, in tokens of a short one."""
        return length * (1 + length / self.even_length)

    @property
    def exact(self) -> bool:
        return self.docs_per_step > 0 and not self.keep_overshoot


def totals_of(documents: Sequence[Rollout]) -> StepTotals:
    return StepTotals(
        num_documents=len(documents),
        num_labels=sum(document.num_labels for document in documents),
        num_tokens=sum(document.num_tokens for document in documents),
    )


def make_plan(
    documents: Sequence[Rollout],
    micro_batches: Sequence[Sequence[int]],
    documents_seen: int,
    ranks: int = 1,
    advantage_std_floor: float = STANDARD_DEVIATION_FLOOR,
) -> StepPlan:
    packed = tuple(tuple(members) for members in micro_batches)
    # Every rank has all documents of the step here, so a scale over the step is the same on each.
    scaled = scale_over_step(documents, advantage_std_floor)
    return StepPlan(tuple(scaled), packed, totals_of(scaled), documents_seen, ranks)


def plan_exactly(documents: Sequence[Rollout], rule: StepRule, documents_seen: int) -> StepPlan:
    """Pack these documents into few micro-batches of near equal cost; ranks run those of like cost side by side."""
    bins = []
    sequences = sequences_of(documents)
    idle = [rule.skip_zero_advantage and not has_advantage(sequence) for sequence in sequences]
    for alike in (False, True):
        members = [index for index in range(len(sequences)) if idle[index] is alike]
        lengths = [sequences[index].num_tokens for index in members]
        costs = [rule.cost(length) for length in lengths]
        packed = balance(lengths, costs, rule.tokens_per_microbatch, rule.multiple)
        bins += [[members[place] for place in places] for places in packed]
    return make_plan(documents, bins, documents_seen, rule.ranks, rule.advantage_std_floor)


def plan_packed(documents: Sequence[Rollout], rule: StepRule, documents_seen: int) -> StepPlan:
    """Pack these documents in order, and add empty micro-batches up to the multiple."""
    lengths = [length for document in documents for length in lengths_of(document)]
    bins = fill_in_order(lengths, rule.tokens_per_microbatch)
    bins += [[] for _ in range(-len(bins) % rule.multiple)]
    return make_plan(documents, bins, documents_seen, rule.ranks, rule.advantage_std_floor)


def lengths_of(document: Rollout) -> list[int]:
    """Return the number of tokens of each of a document's sequences."""
    return [stop - start for start, stop in pairwise((*(document.starts or (0,)), document.num_tokens))]


def count_packed(documents: Sequence[Sequence[int]], rule: StepRule) -> tuple[int, int, bool]:
    """Fill micro-batches in order, from the first of `documents`, until the rule's count is reached.

    `documents` are the lengths of each document's sequences. Returns the numbers of documents and of micro-batches, and
    whether they are final: a step is only known to be full when the next document does not fit whole. A step ends
    before a document, not within one. Where that leaves no multiple of micro-batches, empty ones are added later.
    """
    micro_batches, room = 1, rule.tokens_per_microbatch
    for index, lengths in enumerate(documents):
        more, left = 0, room  # of micro-batches that this document would add
        for length in lengths:
            if length > left:
                more += 1
                left = rule.tokens_per_microbatch
            left -= length
        full = -(-micro_batches // rule.multiple) * rule.multiple
        if index and micro_batches + more > full and _reached(micro_batches, index, rule):
            return index, micro_batches, True
        micro_batches, room = micro_batches + more, left
    return len(documents), micro_batches if documents else 0, False


def may_end(micro_batches: int, documents: int, rule: StepRule) -> bool:
    """Tell whether the step may end here, where its last micro-batch is full or the data ends."""
    return micro_batches % rule.multiple == 0 and _reached(micro_batches, documents, rule)


def _reached(micro_batches: int, documents: int, rule: StepRule) -> bool:
    """Tell whether a step has as many documents, or micro-batches, as the rule asks for."""
    if rule.docs_per_step:
        return documents >= rule.docs_per_step
    return micro_batches >= rule.depth_first_micro_batches * rule.multiple
