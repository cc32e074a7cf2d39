"""The comparison of the sampler's log-probs with the policy's: sums over the labels of each document.

"Standing" tokens were sampled with the current weights, so their ratio should be 1. For "older" tokens, the policy may
have changed since. `step/before/agreement.py` judges the sums.

Dimensions: T labels, D documents, K columns.
"""

import math
from functools import cache

import numpy as np
import torch
from torch.nn.functional import softplus

from truestep.types import PackedLabels

# Pairs of two numbers: a multiple of the tolerance, and the largest share of tokens that may differ by more than that
# multiple if the sampler is correct.
LEVELS = ((1.0, 0.25), (2.0, 0.05), (5.0, 2e-3), (16.0, 2e-4), (64.0, 0.0))
_BEYOND = tuple(f"beyond_{level:g}" for level, _ in LEVELS)
# The first columns are sums over standing tokens, the next over older tokens, the last over all tokens.
COLUMNS = ("standing", *_BEYOND, "up", "down", "surprise", "entropy", "older", "older_up", "logprobs")
COLUMN = {name: number for number, name in enumerate(COLUMNS)}
_OF_STANDING, _OF_OLDER = slice(0, COLUMN["older"]), slice(COLUMN["older"], COLUMN["logprobs"])

# The sampler's log-probs may be rounded to bfloat16 (2^-8 of the value) or to three decimals.
_RELATIVE_ROUNDING, _ROUNDING = 2.0**-8, 5e-4
_SLACK = 0.05  # share of the tolerance by which the mean ratio may differ from 1


def allowed_rounding(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.abs() * _RELATIVE_ROUNDING + _ROUNDING


def compare(
    labels: PackedLabels,
    logprobs: torch.Tensor,  # [T] of the policy
    entropy: torch.Tensor,  # [T] of the policy
    documents_seen: int,
    tolerance: float,
) -> np.ndarray:  # [D, K] float64
    """Compute the sums of `COLUMNS` for each document, on the host. `tolerance`: in nats.

    `up` and `down` are logarithms of bets against the sampler (a test by betting): log(1/2 + r/2) and
    log(3/2 - min(r, 2)/2), where r is the policy's probability of the token divided by the sampler's. If tokens were
    sampled with the sampler's stated probabilities, the mean of r is 1, and the product of all bets exceeds 1/a with a
    probability of at most a.
    """
    if not logprobs.is_cuda and _all_agree(labels, logprobs, documents_seen):
        return _sums_of_agreeing(labels, logprobs, entropy, tolerance)
    known = (labels.has["logprobs"] & labels.has["model_version"])[labels.document]
    standing = known & (labels.model_version == documents_seen)
    older = known & ~standing
    own, given = logprobs.double(), labels.old_logprobs.double()
    gap = own - given
    beyond = (gap.abs() - allowed_rounding(given)).clamp_(min=0)
    signed, slack = beyond.copysign(gap), _SLACK * tolerance
    up = softplus(signed) - (math.log(2) + slack)
    down = signed.clamp_(max=math.log(2)).expm1_().mul_(-0.5).log1p_().sub_(slack)
    one, entropy = torch.ones_like(own), entropy.double()
    beyonds = [(beyond > level * tolerance).double() for level, _ in LEVELS]
    values = torch.stack([one, *beyonds, up, down, own + entropy, entropy, one, up, own])
    # Set to 0, not multiplied by 0: values may be infinite or NaN.
    values[_OF_STANDING].masked_fill_(~standing, 0)
    values[_OF_OLDER].masked_fill_(~older, 0)
    sums = values.new_zeros(len(COLUMNS), len(labels.num_labels))
    return sums.index_add_(1, labels.document, values).T.cpu().numpy()


def _all_agree(labels: PackedLabels, logprobs: torch.Tensor, documents_seen: int) -> bool:
    """Tell whether all labels were sampled with the current weights, and all log-probs differ by less than the allowed
    rounding. Not used on a GPU, where the host would have to wait for the answer."""
    if not (labels.has["logprobs"].numpy().all() and labels.has["model_version"].numpy().all()):
        return False
    if not (labels.model_version.numpy() == documents_seen).all():
        return False
    gaps = np.abs(logprobs.detach().numpy() - labels.old_logprobs.numpy())
    return len(gaps) > 0 and bool(gaps.max() < 0.9 * _ROUNDING)  # False if one is NaN


def _sums_of_agreeing(
    labels: PackedLabels, logprobs: torch.Tensor, entropy: torch.Tensor, tolerance: float
) -> np.ndarray:  # [D, K]
    """Compute the sums of `compare` if `_all_agree`: no difference exceeds a level, and each bet is -slack x tolerance.
    The time depends on the number of calls here, not on the number of values, so this makes few calls."""
    counts, document = labels.num_labels.numpy(), labels.document.numpy()
    own, random = (np.bincount(document, of.detach().numpy(), len(counts)) for of in (logprobs, entropy))
    sums = np.outer(counts, _of_an_agreeing_label(tolerance))
    sums[:, COLUMN["surprise"]] = own + random
    sums[:, COLUMN["entropy"]] = random
    sums[:, COLUMN["logprobs"]] = own
    return sums


@cache
def _of_an_agreeing_label(tolerance: float) -> np.ndarray:  # [K]
    row = np.zeros(len(COLUMNS))
    row[COLUMN["standing"]] = 1.0
    row[[COLUMN["up"], COLUMN["down"]]] = -_SLACK * tolerance
    return row
