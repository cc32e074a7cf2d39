"""Training's log-probs of a step's documents, computed exactly: the sampler's own, to the last bit, while the weights
are those that it had (see `policy.exact`).

They take the place of those that the step's forward pass finds, in losses and metrics. The gradient's other parts are
the forward pass's.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from truestep.head.exact import exact_logprobs, exact_raw_logits
from truestep.policy.exact import documents_hidden, exactly
from truestep.policy.policy import Policy
from truestep.types import Rollout

_LOGITS_BYTES = 512 * 2**20  # of raw logits that exist at a time


@torch.no_grad()
def score_exactly(
    policy: Policy, documents: Sequence[Rollout], micro_batches: Iterable[Sequence[int]]
) -> dict[int, torch.Tensor]:
    """Give the log-probs of the labels of each micro-batch's documents, by their places among the documents. Every rank
    calls this, with its own micro-batches."""
    found: dict[int, torch.Tensor] = {}
    with policy.weights.gathered(), exactly(policy.model):
        for micro_batch in micro_batches:
            members = [index for index in micro_batch if documents[index].num_labels]
            if members:
                hidden = documents_hidden(policy, [documents[index].input_ids for index in members])
                for index, states in zip(members, hidden, strict=True):
                    found[index] = _logprobs(policy, documents[index], states)
    return found


def _logprobs(policy: Policy, document: Rollout, hidden: torch.Tensor) -> torch.Tensor:  # [tokens, H] -> [labels]
    weight, head = policy.head_weight, policy.head
    places = np.flatnonzero(document.loss_mask)
    rows, labels = (torch.from_numpy(values).to(policy.device) for values in (places - 1, document.input_ids[places]))
    temperature = torch.full(labels.shape, document.temperature, dtype=torch.float32, device=policy.device)
    each = max(1, _LOGITS_BYTES // (4 * weight.shape[0]))
    parts = []
    for first in range(0, len(labels), each):
        part = slice(first, first + each)
        raw = exact_raw_logits(hidden[rows[part]], weight, head.fp32)
        parts.append(exact_logprobs(raw, labels[part], temperature[part], head))
    return torch.cat(parts)
