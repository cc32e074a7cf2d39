"""What ranks compare of a plan before they compute it, so that no rank works on other data than the rest.

Every rank digests the documents' ids, lengths and labels, and their packing. Advantages are as many numbers as tokens:
of a large step, a rank digests those of the documents that it computes, and those of another rank.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from truestep.ranks.group import Ranks
from truestep.rollouts.digests import digests_of
from truestep.types import Rollout, StepPlan

_MOST_NUMBERS = 1 << 22  # tokens of a step of which every rank digests all advantages
_ALL = -1

Digests = Mapping[int, str]  # of the plan (`_ALL`), and of the advantages of data ranks


def digests_of_plan(plan: StepPlan, rank: int) -> Digests:
    """Return what a data rank digests of a plan."""
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
    """Return the data rank whose advantages this rank digests too: another one in each step."""
    steps = plan.documents_seen // max(1, plan.totals.num_documents)
    return (rank + 1 + steps % (plan.ranks - 1)) % plan.ranks


def documents_of_rank(plan: StepPlan, rank: int) -> list[int]:
    """Return the documents of which a data rank computes a sequence, in order."""
    return sorted({plan.document_of[index] for members in plan.of_rank(rank) for index in members})


def ranks_that_differ(told: Sequence[Digests | None]) -> list[int]:
    """Return the ranks that digested something else than most of those that digested the same part. None: the rank's
    data has ended."""
    for part in sorted({part for digests in told for part in digests or {_ALL: ""}}):
        said = {rank: (digests or {_ALL: ""}).get(part) for rank, digests in enumerate(told)}
        values = [value for value in said.values() if value is not None]
        usual = max(values, key=values.count)
        if others := [rank for rank, value in said.items() if value is not None and value != usual]:
            return others
    return []


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
    content.update(plan.packed.tobytes())
    content.update("\n".join([document.id for document in plan.documents]).encode(errors="surrogatepass"))
    content.update(plan.counts.tobytes())
    if len(plan.sequences) > len(plan.documents):
        content.update(f"{[document.starts for document in plan.documents]}\n".encode())
    return content


def _add_advantages(content: "hashlib._Hash", plan: StepPlan, indices: Sequence[int]) -> None:
    """A user's own function of advantages may give other numbers on each rank."""
    for index in indices:
        advantages = plan.documents[index].advantages
        content.update(b"-" if advantages is None else advantages.tobytes())
