"""The head in ten obvious lines, differentiated by autograd: what the chunked head must equal.

Dimensions: T labels, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from truestep.head.logits import HeadSettings
from truestep.types import RowStatistics


def plain_statistics(
    hidden: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [V, H]
    label_ids: torch.Tensor,  # [T]
    temperature: torch.Tensor,  # [T]
    settings: HeadSettings,
) -> RowStatistics:
    logits = hidden @ weight.T
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    log_p = torch.log_softmax(logits * settings.scale / temperature[:, None], dim=-1)
    logprobs = log_p[torch.arange(len(label_ids)), label_ids]
    entropy = -(log_p.exp() * log_p).sum(-1)
    logsumexp = torch.logsumexp(logits * settings.scale / temperature[:, None], dim=-1)
    return RowStatistics(logprobs, entropy, logsumexp)
