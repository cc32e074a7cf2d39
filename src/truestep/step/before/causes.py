"""The likely cause of log-probs that are not the policy's, from the accused documents alone."""

from collections.abc import Iterator, Sequence

import numpy as np

from truestep.step.before.agreement import Fault
from truestep.text import printable
from truestep.types import Rollout

_EXPLAINS = 0.1  # a cause is accepted if it reduces the gap to less than this share
_MOST_NAMED = 3  # the largest number of documents listed by id
_MOST_OTHERS = 16  # the largest number of documents whose log-probs are compared with those of others


def explain(
    fault: Fault,
    documents: Sequence[Rollout],  # the accused documents, the worst first
    # the policy's log-probs of each document's labels; empty if the log-probs are right
    logprobs: Sequence[np.ndarray],
    tolerance: float,
) -> str:
    """Describe a fault: the server, its documents, the size of the gap and the likely cause."""
    named = ", ".join(printable(document.id) for document in documents[:_MOST_NAMED])
    more = len(documents) - _MOST_NAMED
    who = f"{printable(fault.server)}: {fault.problem} (documents {named}{f' and {more} more' if more > 0 else ''})"
    if fault.of_draws:
        return (
            f"{who}. Its draws are not the policy's: look for another temperature, top_p, top_k or min_p, a cache of "
            "answers, or one seed for all requests or servers"
        )
    given = [_given(document) for document in documents]
    gaps = np.abs(np.concatenate(logprobs) - np.concatenate(given))
    cause = likely_cause(given, logprobs)
    return (
        f"{who}. Its log-probs are not the policy's: {gaps.mean():.2g} nats away in the mean of {len(gaps)} tokens and "
        f"{gaps.max():.2g} at the most (sampler.tolerance: {tolerance:g}). {cause}"
    )


def _given(document: Rollout) -> np.ndarray:
    assert document.logprobs is not None
    return document.logprobs[document.loss_mask].astype(np.float64)


def likely_cause(given: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> str:
    """Find a simple relation between the given log-probs and the policy's, if there is one."""
    before = _mean_gap(zip(given, own, strict=True))
    for words, pairs in _tries(given, own):
        if _mean_gap(pairs) < _EXPLAINS * before:
            return f"They are {words}"
    below = np.concatenate([their - our for their, our in zip(given, own, strict=True)])
    if (below > -1e-3).all():
        return "They are all too high, as after truncation by top_p, top_k or min_p, or at a lower temperature"
    return (
        "They may be of another temperature, of older weights, of another prompt or of another arithmetic: "
        "`truestep parity` looks for the cause"
    )


def _mean_gap(pairs: "Iterator[tuple[np.ndarray, np.ndarray]] | zip[tuple[np.ndarray, np.ndarray]]") -> float:
    gaps = [np.abs(their - our) for their, our in pairs]
    return float(np.concatenate(gaps).mean()) if gaps and sum(map(len, gaps)) else np.inf


def _tries(
    given: Sequence[np.ndarray], own: Sequence[np.ndarray]
) -> Iterator[tuple[str, Iterator[tuple[np.ndarray, np.ndarray]]]]:
    pairs = list(zip(given, own, strict=True))
    whole_given, whole_own = np.concatenate(given), np.concatenate(own)
    if np.ptp(whole_given) == 0:
        yield f"{whole_given[0]:g} for every token", iter([(whole_given, whole_given)])
    yield "those of the next token (shifted by one)", ((their[:-1], our[1:]) for their, our in pairs)
    yield "those of the token before (shifted by one)", ((their[1:], our[:-1]) for their, our in pairs)
    factor = float(whole_given @ whole_own / max(whole_own @ whole_own, 1e-30))
    yield f"the policy's times {factor:.3g}", ((their, factor * our) for their, our in pairs)
    offset = float(np.median(whole_given - whole_own))
    yield f"the policy's with {offset:+.3g} added", ((their, our + offset) for their, our in pairs)
    yield "those of its tokens in the reverse order", ((their, our[::-1]) for their, our in pairs)
    yield "those of other completions", _of_others(given, own)


def _of_others(given: Sequence[np.ndarray], own: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for place, their in enumerate(given[:_MOST_OTHERS]):
        others = [our for number, our in enumerate(own) if number != place and len(our) == len(their)]
        if others:
            yield their, min(others, key=lambda our: float(np.abs(their - our).mean()))
