"""The losses that clients of the Tinker protocol may ask for: sums over tokens, as the client's documentation defines
them.

lp is the log-prob of a target, q that of the sampler, A the advantage, w the weight, r = exp(lp - q).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from truestep.errors import TruestepError
from truestep.losses.label_losses import LabelLoss, LabelTerm
from truestep.losses.labels import Labels

PREFIX = "tinker_"  # the prefix of the fields that these losses read from labels
_RL = ("logprobs", "advantages")
_CLIPPED = ("clip_low_threshold", "clip_high_threshold")
# `INPUTS`: the inputs that each loss needs for a datum, besides the targets. `NUMBERS`: its numeric options, with their
# defaults.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": _RL,
    "ppo": _RL,
    "cispo": _RL,
    "dro": _RL,
    "gspo": (*_RL, "sequence_ratio_mask"),
}
NUMBERS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": dict(zip(_CLIPPED, (0.8, 1.2), strict=True)),
    "cispo": dict(zip(_CLIPPED, (0.0, 4.0), strict=True)),
    "dro": {"beta": 0.05},
    "gspo": dict(zip(_CLIPPED, (1 - 3e-4, 1 + 4e-4), strict=True)),
}
# Losses that accept several targets at one position and return the loss of each target.
ELEMENTWISE = frozenset({"cross_entropy"})
# The `loss` section of a session that needs only the labels of documents, not their log-probs or advantages.
PLAIN = {"type": "cross_entropy", "normalize_by": "labels"}
_SECRET = "stable_reinforce"
# The per-label fields that each document carries.
FIELDS = ("weights", "logprobs", "advantages", *_CLIPPED, "sequence_ratio_mask", "beta")
Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ClientLoss(LabelLoss):
    name: str

    def __call__(self, labels: Labels) -> LabelTerm:
        values = {name: labels.fields[PREFIX + name] for name in FIELDS}
        return LabelTerm(
            *terms(self.name, labels.logprobs, values, lambda each: labels.document_sums(each)[labels.document])
        )


@dataclass(frozen=True)
class SequenceLoss(ClientLoss):
    """A loss with one ratio for each datum."""

    whole_documents: ClassVar[bool] = True


class ClientLossError(TruestepError):
    """The requested loss does not exist or is not supported."""


def loss_of(name: str) -> ClientLoss:
    if name == _SECRET:
        raise ClientLossError(
            f"loss_fn {name} is not served here: its formula is not public. {', '.join(INPUTS)} are served"
        )
    if name not in INPUTS:
        raise ClientLossError(f"loss_fn {name[:60]!r} is unknown: it may be {', '.join(INPUTS)}")
    return SequenceLoss(name) if name == "gspo" else ClientLoss(name)


def terms(
    name: str, logprobs: torch.Tensor, values: Values, datum_sums: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of each token, and its slope in the token's log-prob. `datum_sums` takes a
    value for each token, and returns for each token the sum over its datum."""
    if name == "cross_entropy":
        return -values["weights"] * logprobs, -values["weights"]
    advantages, log_ratio = values["advantages"], logprobs - values["logprobs"]
    if name == "dro":
        beta = values["beta"]
        return -(logprobs * advantages - 0.5 * beta * log_ratio.square()), -(advantages - beta * log_ratio)
    if name == "gspo":  # one ratio for each datum
        marked = (values["sequence_ratio_mask"] != 0).to(logprobs.dtype)
        log_ratio = datum_sums(log_ratio * marked) / datum_sums(marked).clamp(min=1)
    ratio = log_ratio.exp().to(logprobs.dtype)
    if name == "importance_sampling":
        return -ratio * advantages, -ratio * advantages
    held = torch.minimum(torch.maximum(ratio, values[_CLIPPED[0]]), values[_CLIPPED[1]])
    if name == "cispo":
        return -held * logprobs * advantages, -held * advantages
    plain, clipped = ratio * advantages, held * advantages  # ppo and gspo
    return -torch.minimum(plain, clipped), torch.where(plain <= clipped, -plain, 0)
