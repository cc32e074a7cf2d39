"""A user's own loss for the float64 oracle: one document at a time, differentiated by autograd."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from truestep.losses.label_losses import LabelLoss
from truestep.losses.labels import Labels
from truestep.rollouts.fields import names_in_has
from truestep.tools.verify.oracle.records import Document
from truestep.tools.verify.oracle.values import LabelValues


@dataclass(frozen=True)
class CustomOracle:
    """A user's own loss. Its gradient comes from its formula by autograd, not from its slope. `detach()` works as
    usual."""

    loss: LabelLoss

    @property
    def document_ratio(self) -> bool:
        return self.loss.document_ratio

    @property
    def bounds(self) -> tuple[float, float] | None:
        return self.loss.bounds

    def losses(self, document: Document, labels: list[LabelValues]) -> list[torch.Tensor]:
        """Call the user's loss with one document as the whole batch."""
        logprobs, entropy, logsumexp = (
            torch.stack([getattr(label, name) for label in labels]) for name in ("logprob", "entropy", "logsumexp")
        )
        return list(self.loss(document_labels(document, logprobs, entropy, logsumexp)).loss)


def document_labels(
    document: Document, logprobs: torch.Tensor, entropy: torch.Tensor, logsumexp: torch.Tensor
) -> Labels:
    """Make a float64 batch of labels from a single document."""
    count = len(document.positions)

    def vector(values: Sequence[float] | None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype) if values is None else torch.tensor(values, dtype=dtype)

    def exact(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64 if any(isinstance(value, float) for value in values) else None)

    known = {
        "logprobs": document.old_logprobs,
        "advantages": document.advantages,
        "model_version": document.versions,
        "reward": document.reward,
        "reference_logprobs": document.reference_logprobs,
        "truncated": document.truncated,
        **document.fields,
    }
    has = [*names_in_has(), *document.fields]
    return Labels(
        rows=torch.tensor(document.positions) - 1,
        ids=torch.tensor([document.input_ids[position] for position in document.positions]),
        document=vector(None, torch.int64),
        temperature=torch.full((count,), document.temperature, dtype=torch.float64),
        old_logprobs=vector(document.old_logprobs),
        advantages=vector(document.advantages),
        model_version=vector(document.versions, torch.int64),
        reference_logprobs=vector(document.reference_logprobs),
        recomputed_logprobs=vector(None),
        chosen=vector(None, torch.int64),
        sampler_logprobs=vector(document.sampler_logprobs or document.old_logprobs),
        recomputed=document.sampler_logprobs is not None,
        num_labels=torch.tensor([count]),
        document_labels=torch.tensor([count]),
        counts=torch.tensor([True]),
        others_have_advantage=torch.tensor([False]),
        reward=torch.tensor([document.reward or 0.0], dtype=torch.float64),
        rewards={name: torch.tensor([value]) for name, value in document.rewards.items()},
        truncated=torch.tensor([bool(document.truncated)]),
        has={name: torch.tensor([known.get(name) is not None]) for name in has},
        fields={name: exact(value) for name, value in document.fields.items() if isinstance(value, list)},
        document_fields={
            name: exact([value]) for name, value in document.fields.items() if not isinstance(value, list)
        },
        logprobs=logprobs,
        entropy=entropy,
        logsumexp=logsumexp,
        weight=torch.ones(count, dtype=torch.float64),
    )
