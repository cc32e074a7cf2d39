"""Exact log-probs of a step's documents: bitwise equal to the sampler's if the weights are still the same (see
`model.exact`).

In losses and metrics they replace the log-probs of the step's forward pass. Gradients are still computed through the
forward pass.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from truestep.head.exact import exact_logprobs, exact_raw_logits
from truestep.model.exact import documents_hidden, exactly
from truestep.model.policy import Policy
from truestep.types import Rollout, sent

_LOGITS_BYTES = 512 * 2**20  # limit for raw logits in memory at a time


@torch.no_grad()
def score_exactly(
    policy: Policy, documents: Sequence[Rollout], micro_batches: Iterable[Sequence[int]]
) -> dict[int, torch.Tensor]:
    """Compute the log-probs of the labels of each micro-batch's documents. Return them by the documents' indices. Every
    rank must call this, with its own micro-batches."""
    found: dict[int, torch.Tensor] = {}
    with policy.weights.gathered(), exactly(policy.model):
        for micro_batch in micro_batches:
            members = [index for index in micro_batch if documents[index].num_labels]
            if members:
                hidden = documents_hidden(policy, [documents[index].input_ids for index in members])
                found |= _logprobs(policy, {index: documents[index] for index in members}, hidden)
    return found


def _logprobs(
    policy: Policy,
    documents: Mapping[int, Rollout],
    hidden: Sequence[torch.Tensor],  # [tokens, H] per document
) -> dict[int, torch.Tensor]:
    weight, head = policy.head_weight, policy.head
    ends = np.cumsum([0, *(len(states) for states in hidden)])
    places = [np.flatnonzero(document.loss_mask) for document in documents.values()]
    counts = [len(own) for own in places]

    def send(values: Sequence[np.ndarray]) -> torch.Tensor:
        return sent(torch.from_numpy(np.concatenate(values)), policy.device)

    rows = send([own - 1 + first for own, first in zip(places, ends, strict=False)])
    labels = send([document.input_ids[own] for document, own in zip(documents.values(), places, strict=True)])
    temperature = send(
        [
            np.full(count, document.temperature, dtype=np.float32)
            for document, count in zip(documents.values(), counts, strict=True)
        ]
    )
    states = torch.cat(list(hidden))
    each = max(1, _LOGITS_BYTES // (4 * weight.shape[0]))
    parts = []
    for first in range(0, len(labels), each):
        part = slice(first, first + each)
        raw = exact_raw_logits(states[rows[part]], weight, head.fp32)
        parts.append(exact_logprobs(raw, labels[part], temperature[part], head))
    return dict(zip(documents, torch.cat(parts).split(counts), strict=True))
