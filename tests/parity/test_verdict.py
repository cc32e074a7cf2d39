"""What parity says of its causes: one that explains all of the gap, most of it, or little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from truestep.tools.parity.causes import Tried
from truestep.tools.parity.gap import Parity, Token

BASE = Tried("as it is", "nothing", "", np.full(100, 0.5))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (0.01, "temperature (temperature 0.7) explains 98% of the gap: record it"),
        (0.05, "temperature (temperature 0.7) explains 90% of the gap: record it"),
        (
            0.2,
            "no single cause found for a mean gap of 5.0e-01: temperature (temperature 0.7) explains 60% of it, and "
            "something else the rest. Of this cause: record it",
        ),
        (0.4, "a mean gap of 5.0e-01 that no single cause explains: look at the worst token"),
    ],
)
def test_the_verdict_says_how_much_the_best_cause_explains(left: float, said: str) -> None:
    tried = [Tried("temperature", "temperature 0.7", "record it", np.full(100, left))]
    worst = Token("a", 1, 2, "b", -1.0, -1.5)
    result = Parity(4, 100, BASE, tried, worst, 0.02, Path("m"), np.zeros(100))
    assert result.verdict.startswith(said)
