"""Losses as a user would write them, outside the package. The tests name them by import path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from truestep.losses.label_losses import LabelLoss, LabelTerm
from truestep.losses.labels import Labels


@dataclass(frozen=True)
class Saturating(LabelLoss):
    """-A tanh(s m) / s of whole documents, with m the mean log-ratio and A the mean advantage of the document."""

    sharpness: float
    whole_documents: ClassVar[bool] = True

    def __call__(self, labels: Labels) -> LabelTerm:
        advantages = labels.document_means(labels.advantages)
        saturated = torch.tanh(self.sharpness * self.log_ratio(labels))
        return LabelTerm(-advantages * saturated / self.sharpness, -advantages * (1 - saturated.square()))


@dataclass(frozen=True)
class WrongSlope(Saturating):
    """The same loss with a slope that is not its derivative."""

    def __call__(self, labels: Labels) -> LabelTerm:
        return LabelTerm(super().__call__(labels).loss, -labels.document_means(labels.advantages))


@dataclass(frozen=True)
class Imitation(LabelLoss):
    """Cross-entropy, which needs no advantage, with a constant weight that `detach` holds."""

    supervised: ClassVar[bool] = True

    def __call__(self, labels: Labels) -> LabelTerm:
        weight = 1 - labels.logprobs.detach().exp()
        return LabelTerm(-weight * labels.logprobs, -weight)


class NoLoss:
    """It does not derive from LabelLoss."""


@dataclass(frozen=True)
class Weighed(LabelLoss):
    """Cross-entropy whose labels have weights of the user's own, and whose documents have one more."""

    supervised: ClassVar[bool] = True

    def __call__(self, labels: Labels) -> LabelTerm:
        weight = labels.fields["my_weight"] * labels.document_fields["difficulty"][labels.document]
        weight = weight + labels.fields["bonus"]
        return LabelTerm(-weight * labels.logprobs, -weight)


@dataclass(frozen=True)
class WeighedPolicy(LabelLoss):
    """A policy gradient that is weighed so."""

    def __call__(self, labels: Labels) -> LabelTerm:
        weight = labels.fields["my_weight"] * labels.document_fields["difficulty"][labels.document]
        slope = -weight * labels.advantages * labels.log_ratio.exp()
        return LabelTerm(slope, slope)
