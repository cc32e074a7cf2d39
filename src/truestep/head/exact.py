"""The head's log-probs with exact arithmetic: the bits of a log-prob depend only on its own row (see
`truestep.numerics`).

Dimensions: C rows of a chunk, H hidden, V vocabulary.
"""

import torch

from truestep.head.logits import HeadSettings, multiplier, wide
from truestep.numerics import arithmetic, plain


def exact_raw_logits(
    hidden: torch.Tensor, weight: torch.Tensor, fp32: bool
) -> torch.Tensor:  # [C, H], [V, H] -> [C, V]
    """Compute h Wᵀ, rounded as by `logits.raw_logits`."""
    return arithmetic.product(hidden, weight, dtype=wide(hidden.dtype) if fp32 else hidden.dtype)


def exact_logprobs(
    raw: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor, settings: HeadSettings
) -> torch.Tensor:  # [C, V], [C], [C] -> [C]
    """Compute each row's log-prob of one token from raw logits."""
    z = raw.to(wide(raw.dtype))
    if settings.softcap is not None:
        z = plain.each(torch.tanh, z / settings.softcap) * settings.softcap
    z = z * multiplier(temperature, settings, z.dtype)[:, None]
    return z.gather(-1, tokens[:, None]).squeeze(-1) - arithmetic.logsumexp(z)
