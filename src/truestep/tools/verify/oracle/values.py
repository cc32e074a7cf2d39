"""Log-prob, entropy and log-sum-exp of each label by a float64 model: docs/contract.md, section 5."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from truestep.tools.verify.oracle.records import Document


class Model(Protocol):
    """A float64 causal language model, one document at a time."""

    parameters: dict[str, Tensor]  # leaf tensors to differentiate; a tied weight occurs once

    def logits(
        self, input_ids: list[int], temperature: float = 1.0, routes: list[list[list[int]]] | None = None
    ) -> Tensor:  # [T, V]
        """Compute softcap(h Wᵀ) · logits_scale / temperature. `routes`: the experts of the first tokens, in each layer
        with a router; None: the routers' own choice."""


@dataclass
class LabelValues:
    """The model's values of one label: scalars on the autograd graph."""

    logprob: Tensor
    entropy: Tensor
    logsumexp: Tensor


def label_values(model: Model, document: Document) -> list[LabelValues]:
    if not document.positions:
        return []
    logits = model.logits(document.input_ids, document.temperature, document.routes)  # [T, V]
    result = []
    for position in document.positions:
        z = logits[position - 1]  # the previous token predicts this one
        logsumexp = torch.logsumexp(z, dim=0)
        probabilities = torch.exp(z - logsumexp)
        logprob = z[document.input_ids[position]] - logsumexp
        entropy = logsumexp - (probabilities * z).sum()
        result.append(LabelValues(logprob, entropy, logsumexp))
    return result
