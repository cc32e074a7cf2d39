"""The labels that `loss.clip_cov` and `loss.kl_cov` choose from all of a step's documents, before the first pass.

The covariance of a label is (logπ_sampler - its mean) · (A - its mean), with means over the step's labels. It depends
only on the documents, so every layout chooses the same labels.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from truestep.losses.exploration import ClipCov, KlCov
from truestep.types import Rollout, sequences_of


@dataclass(frozen=True)
class Chooser:
    rule: ClipCov | KlCov
    seed: int

    def choose(self, documents: Sequence[Rollout], documents_seen: int) -> tuple[Rollout, ...]:
        """Mark the chosen labels of a step's documents."""
        covariance = covariances(documents)
        count = max(int(self.rule.share * len(covariance)), 1)
        if isinstance(self.rule, KlCov):
            candidates = np.flatnonzero(covariance > 0)
            picked = candidates[np.argsort(-covariance[candidates], kind="stable")[:count]]
        else:
            candidates = np.flatnonzero((covariance > self.rule.low) & (covariance < self.rule.high))
            draws = self._draws(documents, candidates, documents_seen)
            picked = candidates[sorted(range(len(candidates)), key=draws.__getitem__)[:count]]
        chosen = np.zeros(len(covariance), np.uint8)
        chosen[picked] = 1
        return _with_chosen(documents, chosen)

    def _draws(self, documents: Sequence[Rollout], labels: np.ndarray, documents_seen: int) -> list[bytes]:
        """Return random sort keys for labels. A key depends only on the seed, the step, the record's id and the
        position."""
        sequences = sequences_of(documents)
        owner = np.repeat(np.arange(len(sequences)), [sequence.num_labels for sequence in sequences])
        position = np.concatenate([np.flatnonzero(sequence.loss_mask) for sequence in sequences])
        texts = (f"{self.seed} {documents_seen} {position[at]} {sequences[owner[at]].id}" for at in labels)
        return [hashlib.sha256(text.encode(errors="surrogatepass")).digest() for text in texts]


def covariances(documents: Sequence[Rollout]) -> np.ndarray:  # [labels of the step] float64
    def at_labels(name: str) -> np.ndarray:
        parts = [getattr(document, name)[document.loss_mask] for document in documents if document.num_labels]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float64)

    logprobs, advantages = at_labels("logprobs"), at_labels("advantages")
    if not len(logprobs):
        return logprobs
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def _with_chosen(documents: Sequence[Rollout], chosen: np.ndarray) -> tuple[Rollout, ...]:
    marked, start = [], 0
    for document in documents:
        values = np.zeros(document.num_tokens, np.uint8)
        values[document.loss_mask] = chosen[start : start + document.num_labels]
        start += document.num_labels
        marked.append(replace(document, chosen=values))
    return tuple(marked)
