"""Digests of a plan, which ranks compare before they compute it, so that all ranks work on the same data.

Every rank computes a digest of the documents' ids, lengths and numbers of labels, and of their packing. There are as
many advantages as tokens, so in a large step a rank digests only those of its own documents and of one other rank's.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from truestep.ranks.group import Ranks
from truestep.rollouts.digests import digests_of
from truestep.types import Rollout, StepPlan

_MOST_NUMBERS = 1 << 22  # in a step of at most so many tokens, every rank digests all advantages
_ALL = -1

Digests = Mapping[int, str]  # of the plan under `_ALL`, and of the advantages of data ranks


def digests_of_plan(plan: StepPlan, rank: int) -> Digests:
    """Return the digests of a plan that a data rank computes."""
    content = _content(plan)
    if plan.totals.num_tokens <= _MOST_NUMBERS or plan.ranks == 1:
        _add_advantages(content, plan, range(len(plan.documents)))
        return {_ALL: content.hexdigest()}
    found = {_ALL: content.hexdigest()}
    for watched in (rank, other_of(plan, rank)):
        of_rank = hashlib.sha256()
        _add_advantages(of_rank, plan, documents_of_rank(plan, watched))
        found[watched] = of_rank.hexdigest()
    return found


def other_of(plan: StepPlan, rank: int) -> int:
    """Return the other data rank whose advantages this rank digests. It changes from step to step."""
    steps = plan.documents_seen // max(1, plan.totals.num_documents)
    return (rank + 1 + steps % (plan.ranks - 1)) % plan.ranks


def documents_of_rank(plan: StepPlan, rank: int) -> list[int]:
    """Return the documents of which a data rank computes a sequence, in order."""
    return sorted({plan.document_of[index] for members in plan.of_rank(rank) for index in members})


def disagreement(told: Sequence[Any]) -> str | None:
    """Name the ranks whose digests differ; None if all agree. `told` has for each rank: its digests; None if its data
    has ended; any other value if it takes part in another exchange, because it has other data."""
    digests = [each if isinstance(each, dict) else {_ALL: type(each).__name__} for each in told]
    for part in sorted({part for each in digests for part in each}):
        alike: dict[str, list[int]] = {}
        for rank, each in enumerate(digests):
            if part in each:
                alike.setdefault(each[part], []).append(rank)
        if len(alike) == 1:
            continue
        most, *others = sorted(alike.values(), key=len, reverse=True)
        if part != _ALL:
            return f"ranks {_and(most, *others)} have different advantages for the documents of data rank {part}"
        if len(most) == len(others[0]):
            return f"ranks {_and(most, *others)} planned different steps"
        return f"ranks {_and(sorted(chain(*others)))} planned another step than the rest"
    return None


def _and(*groups: Sequence[int]) -> str:
    return " and ".join(", ".join(map(str, ranks)) for ranks in groups)


def digests_by_all(documents: Sequence[Rollout], own_reference: bool, ranks: Ranks) -> list[str]:
    """Return each document's digest for the ledger, on every rank; each data rank makes some of them. `own_reference`:
    as in `digests_of`."""
    parts = ranks.gather_parts(digests_of(documents[ranks.data_rank :: ranks.data], own_reference))
    found = [""] * len(documents)
    for rank, part in enumerate(parts):
        found[rank :: ranks.data] = part
    return found


def _content(plan: StepPlan) -> "hashlib._Hash":
    content = hashlib.sha256(f"{plan.totals} {plan.documents_seen} {plan.ranks}\n".encode())
    content.update(np.fromiter(map(len, plan.micro_batches), np.int64).tobytes())
    content.update(plan.packed.data)
    content.update(plan.facts.view(np.uint8).data)
    if len(plan.sequences) > len(plan.documents):
        content.update(f"{[document.starts for document in plan.documents]}\n".encode())
    return content


def _add_advantages(content: "hashlib._Hash", plan: StepPlan, indices: Sequence[int]) -> None:
    """Add the documents' advantages to a digest, because a user's own function may give other numbers on each rank."""
    for index in indices:
        advantages = plan.documents[index].advantages
        content.update(b"-" if advantages is None else advantages.tobytes())
