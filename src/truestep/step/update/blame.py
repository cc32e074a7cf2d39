"""The search for the cause of an unusable gradient. It runs only after a step had one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from truestep.step.compute.runner import StepRunner
from truestep.step.update.gradient_clipping import gradient_norm, usable
from truestep.text import printable
from truestep.types import DocumentScore, Rollout, StepPlan
from truestep.weights.finite import largest

MOST_NAMED = 5


def find_cause(runner: StepRunner, plan: StepPlan, clip: float | None) -> str:
    """Return a sentence about the cause of an unusable gradient: some documents of the plan, or the weights. Every rank
    must call this. It does not change the weights."""
    found = find_useless(runner, plan, clip)
    if not found:
        return "no single document causes it"
    names = ", ".join(printable(plan.documents[index].id) for index in found)
    if _useless_without_values(runner, only(plan, found), clip):
        weights = runner.policy.weights
        size, where = largest({**weights.frozen, **weights.master}, weights.ranks)
        return (
            f"the documents are not the cause: {names} have no usable gradient even with advantages of 1 and the "
            f"policy's own log-probs. The weights give no usable gradient; the largest number among them is "
            f"{size:.1e}, in {printable(where)}"
        )
    return f"each of these documents alone causes it: {names}"


def find_useless(runner: StepRunner, plan: StepPlan, clip: float | None) -> list[int]:
    """Return the indices of documents whose own gradient is unusable, at most `MOST_NAMED` of them.

    It is a binary search, so a single bad document costs about two steps. If only the sum of gradients is too large, no
    document is found.
    """
    found: list[int] = []
    waiting = [tuple(range(len(plan.documents)))]
    while waiting and len(found) < MOST_NAMED:
        some = waiting.pop(0)
        runner.accumulate(only(plan, some))
        if usable(gradient_norm(runner.policy.weights), clip):
            continue
        if len(some) == 1:
            found.append(some[0])
        else:
            waiting[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return found


def _useless_without_values(runner: StepRunner, plan: StepPlan, clip: float | None) -> bool:
    """Return whether the gradient of these documents is unusable even without their recorded values: at temperature 1,
    with advantages of 1, and with the policy's own log-probs in place of all recorded ones."""
    plan = replace(plan, documents=tuple(replace(document, temperature=1.0) for document in plan.documents))
    scored = replace(runner, keep_scores=True).accumulate(plan, backward=False).scores
    plain = tuple(_plain(*pair) for pair in zip(plan.documents, scored, strict=True))
    runner.accumulate(replace(plan, documents=plain))
    return not usable(gradient_norm(runner.policy.weights), clip)


def _plain(document: Rollout, score: DocumentScore) -> Rollout:
    own = np.zeros(document.num_tokens, np.float32)
    own[document.loss_mask] = score.logprobs
    return replace(
        document,
        logprobs=None if document.logprobs is None else own,
        advantages=None if document.advantages is None else document.loss_mask.astype(np.float32),
        reference_logprobs=None if document.reference_logprobs is None else own,
        recomputed_logprobs=None if document.recomputed_logprobs is None else own,
    )


def only(plan: StepPlan, some: Sequence[int]) -> StepPlan:
    """Return the plan with only some of its documents, but the same totals and number of micro-batches."""
    wanted = {index: number for number, index in enumerate(some)}
    kept = [number for number, document in enumerate(plan.document_of) if document in wanted]
    kept.sort(key=lambda number: (wanted[plan.document_of[number]], number))
    place = {index: number for number, index in enumerate(kept)}
    micro_batches = (tuple(place[index] for index in members if index in place) for members in plan.micro_batches)
    documents = tuple(plan.documents[i] for i in some)
    return replace(plan, documents=documents, micro_batches=tuple(micro_batches), forests={})
