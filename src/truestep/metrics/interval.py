"""The 95% confidence interval of a mean over independent values, such as the rewards of held-out questions."""

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

_BELOW = 0.975  # the probability below the upper end


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the width of the 95% interval of the values' mean, by Student's t. None where the values show no
    spread to estimate it from: there is one, or all are equal."""
    if len(values) < 2 or min(values) == max(values):
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def half_width_of_means(half_widths: Sequence[float | None]) -> float | None:
    """Return the half-width of the interval of a mean of independent means, from their half-widths. None if one is
    unknown."""
    known = [width for width in half_widths if width is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(half_widths) else None


def t_quantile(freedom: int) -> float:
    """Return the point that 97.5% of Student's t lie below: within 0.2%, by the expansion of Cornish and Fisher from 3
    degrees of freedom on, where it has no simple form."""
    if freedom == 1:
        return math.tan(math.pi * (_BELOW - 0.5))
    if freedom == 2:
        return (2 * _BELOW - 1) * math.sqrt(2 / (4 * _BELOW * (1 - _BELOW)))
    z = NormalDist().inv_cdf(_BELOW)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
