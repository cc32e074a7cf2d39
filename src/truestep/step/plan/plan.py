"""Chooses the documents of each step, on the host, from their order.

exact    the next `docs_per_step` documents, packed afterwards: the set does not depend on the token budget
packed   the next micro-batches, packed in order until a rule ends the step: the set depends on the token budget
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from truestep.rollouts.advantages import STANDARD_DEVIATION_FLOOR, scale_over_step
from truestep.rollouts.packing import balance, fill_in_order
from truestep.rollouts.prefixes import find_segments, identities
from truestep.rollouts.selection import has_advantage
from truestep.step.plan.trees import Packables, Spread, find_items_together
from truestep.types import Rollout, ShareMode, Sharing, StepPlan, StepTotals, facts_of, sequences_of


@dataclass(frozen=True)
class StepRule:
    """The options of `schedule` and `data` that define a step."""

    docs_per_step: int  # 0: the number of micro-batches is fixed instead
    keep_overshoot: bool
    depth_first_micro_batches: int
    breadth_first_micro_batches: int
    tokens_per_microbatch: int
    ranks: int = 1
    # smallest standard deviation that divides advantages, if they are scaled over the step
    advantage_std_floor: float = STANDARD_DEVIATION_FLOOR
    skip_zero_advantage: bool = False  # put documents without an advantage into separate micro-batches
    even_length: float = math.inf  # length at which a document's attention costs as much as its matrix products
    share: ShareMode = "off"
    # tokens; below this, a micro-batch leaves the GPU waiting for its host, so `auto` shares no prefix
    busy: float = 0.0
    # tokens that a shared segment must save with `auto`, so that documents are not cut into very short segments
    least_of_auto: int = 64
    alike: tuple[str, ...] = ()  # per-token fields that must be equal in a shared prefix

    @property
    def least_saved(self) -> int:
        """The smallest number of tokens that a shared segment must save."""
        return self.least_of_auto if self.share == "auto" else 1

    @property
    def multiple(self) -> int:
        """The number of a step's micro-batches is a multiple of this."""
        return self.ranks * self.breadth_first_micro_batches

    @property
    def exact(self) -> bool:
        return self.docs_per_step > 0 and not self.keep_overshoot


def totals_of(documents: Sequence[Rollout]) -> StepTotals:
    return _totals(facts_of(documents))


def _totals(facts: np.ndarray) -> StepTotals:
    num_labels, num_tokens = (int(facts[name].sum(dtype=np.int64)) for name in ("labels", "tokens"))
    return StepTotals(len(facts), num_labels, num_tokens)


def make_plan(
    documents: Sequence[Rollout],
    micro_batches: Sequence[Sequence[int]],
    documents_seen: int,
    ranks: int = 1,
    advantage_std_floor: float = STANDARD_DEVIATION_FLOOR,
    sharing: Sharing | None = None,
    repeated: bool = False,
    distinct: int | None = None,
    known: np.ndarray | None = None,
) -> StepPlan:
    """Make a plan of packed documents. `known`: the documents' facts, if they are known already."""
    packed = tuple(tuple(members) for members in micro_batches)
    # Every rank has all documents of the step here, so scaling over the step gives the same result on each.
    scaled = scale_over_step(documents, advantage_std_floor)
    known = facts_of(documents) if known is None else known
    totals = _totals(known)
    return StepPlan(tuple(scaled), packed, totals, documents_seen, ranks, repeated, sharing, distinct, known=known)


def plan_exactly(
    documents: Sequence[Rollout],
    rule: StepRule,
    documents_seen: int,
    spread: Spread | None = None,
    repeated: bool = False,
) -> StepPlan:
    """Pack these documents into few micro-batches of about equal cost. Ranks run micro-batches of similar cost at the
    same time. With `spread`, all ranks call this at the same time, and share the work in a large step."""
    known = facts_of(documents)
    sequences, lengths = _sequences(documents, known)
    bins, shares, distinct = _packed(sequences, lengths, rule, spread)
    sharing = Sharing(rule.least_saved, rule.tokens_per_microbatch, rule.alike) if shares else None
    floor = rule.advantage_std_floor
    return make_plan(documents, bins, documents_seen, rule.ranks, floor, sharing, repeated, distinct, known)


def _sequences(documents: Sequence[Rollout], known: np.ndarray) -> tuple[Sequence[Rollout], list[int]]:
    """Return the sequences of documents, in order, and their lengths. `known`: the documents' facts."""
    if known["starts"].any():
        sequences = sequences_of(documents)
        return sequences, facts_of(sequences)["tokens"].tolist()
    return documents, known["tokens"].tolist()


def _packed(
    sequences: Sequence[Rollout], lengths: Sequence[int], rule: StepRule, spread: Spread | None
) -> tuple[list[list[int]], bool, int | None]:
    """Return the members of each micro-batch, and whether they share prefixes. Also return the number of tokens if each
    shared prefix were computed once; None if no prefixes were looked for, or if sharing would save no time."""
    alone = Packables.alone(lengths, rule.even_length)
    if rule.share == "off" or (rule.share == "auto" and not _busy(alone, rule)):
        return _balanced(sequences, alone, rule)[0], False, None
    limits, even = _limits(alone, rule), rule.even_length
    found = find_items_together(sequences, rule.alike, rule.least_saved, limits, even, spread, rule.ranks)
    tries = [items for items in found if len(items.members) < len(sequences)]
    if rule.share == "auto" or not tries:
        tries.append(alone)
    best, least = tries[0], math.inf
    for each in tries:
        if each.least_cost(rule.ranks) >= least:  # it cannot cost less than the best
            continue
        packed, cost = _balanced(sequences, each, rule)
        if cost < least:
            best, least, bins = each, cost, packed
    saves_no_time = best is alone and len(tries) > 1
    return bins, best is not alone or rule.share == "always", None if saves_no_time else found[0].distinct


def _busy(alone: Packables, rule: StepRule) -> bool:
    """Tell whether micro-batches without shared prefixes keep the device busy. If not, fewer tokens save no time."""
    return alone.cost >= rule.busy * max(rule.multiple, sum(alone.tokens) / rule.tokens_per_microbatch)


def _limits(alone: Packables, rule: StepRule) -> list[int]:
    """Return the limits for the size of a tree to try. With few trees, smaller limits divide them, to keep all ranks
    busy."""
    longest = max(alone.tokens, default=1)
    each = -(-sum(alone.tokens) // rule.multiple)
    smaller = (max(longest, min(rule.tokens_per_microbatch, each // parts)) for parts in (1, 2, 4))
    return list(dict.fromkeys((rule.tokens_per_microbatch, *smaller)))


def _balanced(sequences: Sequence[Rollout], items: Packables, rule: StepRule) -> tuple[list[list[int]], float]:
    """Pack items into micro-batches. Return these, and the step's cost: the sum over rounds of the slowest rank's
    cost."""
    bins, slowest = [], 0.0
    chosen = items, Packables([], [], [])
    if rule.skip_zero_advantage:
        chosen = items.divided([any(has_advantage(sequences[index]) for index in each) for each in items.members])
    for part in chosen:
        packed = balance(part.tokens, part.costs, rule.tokens_per_microbatch, rule.multiple)
        each = _sums(part.costs, packed)
        slowest += math.fsum(max(each[start : start + rule.ranks]) for start in range(0, len(each), rule.ranks))
        bins += [sorted(chain.from_iterable(map(part.members.__getitem__, places))) for places in packed]
    return bins, slowest


def _sums(costs: Sequence[float], bins: Sequence[Sequence[int]]) -> list[float]:
    """Return the cost of each micro-batch. Additions are in order, so that all ranks get the same bits."""
    number = np.repeat(np.arange(len(bins)), [len(places) for places in bins])
    places = np.fromiter(chain.from_iterable(bins), np.int64, len(number))
    return list(np.bincount(number, np.asarray(costs, np.float64)[places], len(bins)).tolist())


def plan_packed(documents: Sequence[Rollout], rule: StepRule, documents_seen: int, repeated: bool = False) -> StepPlan:
    """Pack these documents in order, and add empty micro-batches up to a multiple of `rule.multiple`. Shared prefixes
    do not change the documents of a micro-batch."""
    known = facts_of(documents)
    sequences, lengths = _sequences(documents, known)
    bins = fill_in_order(lengths, rule.tokens_per_microbatch)
    sharing: Sharing | None = Sharing(rule.least_saved, alike=rule.alike)
    if rule.share == "off" or (rule.share == "auto" and not _pays(sequences, lengths, bins, rule)):
        sharing = None
    bins += [[] for _ in range(-len(bins) % rule.multiple)]
    floor = rule.advantage_std_floor
    return make_plan(documents, bins, documents_seen, rule.ranks, floor, sharing, repeated, known=known)


def _pays(sequences: Sequence[Rollout], lengths: Sequence[int], bins: Sequence[Sequence[int]], rule: StepRule) -> bool:
    """Tell whether sharing prefixes saves time."""
    alone = Packables.alone(lengths, rule.even_length)
    if not _busy(alone, rule):
        return False
    ids = identities(sequences, rule.alike)
    forests = (find_segments([ids[index] for index in members], rule.least_saved) for members in bins)
    return math.fsum(forest.cost(rule.even_length) for forest in forests) < alone.cost


def lengths_of(document: Rollout) -> list[int]:
    """Return the number of tokens of each of a document's sequences."""
    return [stop - start for start, stop in pairwise((*(document.starts or (0,)), document.num_tokens))]


def count_packed(documents: Sequence[Sequence[int]], rule: StepRule) -> tuple[int, int, bool]:
    """Fill micro-batches in order, from the first of `documents`, until the rule's count is reached.

    `documents` are the lengths of each document's sequences. Returns the numbers of documents and of micro-batches, and
    whether they are final. A step is full when the next document no longer fits, so that document must be known. A
    document is never divided between steps. Empty micro-batches are added later if the number is no multiple.
    """
    micro_batches, room = 1, rule.tokens_per_microbatch
    for index, lengths in enumerate(documents):
        # number of micro-batches that this document would add, and the tokens left in the last one
        more, left = 0, room
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
    """Tell whether the step may end after these documents, if its last micro-batch is full or the data ends."""
    return micro_batches % rule.multiple == 0 and _reached(micro_batches, documents, rule)


def _reached(micro_batches: int, documents: int, rule: StepRule) -> bool:
    """Tell whether a step has enough documents, or enough micro-batches, for the rule."""
    if rule.docs_per_step:
        return documents >= rule.docs_per_step
    return micro_batches >= rule.depth_first_micro_batches * rule.multiple
