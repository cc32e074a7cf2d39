"""Intervals of means: Student's t by numerical integration of its density, and coverage of drawn samples."""

from __future__ import annotations

import math
import random

import pytest

from truestep.metrics.interval import half_width, half_width_of_means, t_quantile


def below(point: float, freedom: int) -> float:
    """The share of Student's t below a point, by Simpson's rule over the angle whose tangent is t / sqrt(freedom)."""
    end, pieces = math.atan(point / math.sqrt(freedom)), 2000
    heights = [math.cos(end * place / pieces) ** (freedom - 1) for place in range(pieces + 1)]
    area = heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2])
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return 0.5 + area * end / pieces / 3 / whole


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 1000])
def test_quantiles_are_those_of_student_s_t(freedom: int) -> None:
    near, far = 0.0, 20.0
    while far - near > 1e-9:
        middle = (near + far) / 2
        near, far = (middle, far) if below(middle, freedom) < 0.975 else (near, middle)
    assert t_quantile(freedom) == pytest.approx(near, rel=2e-3)


def test_95_of_100_intervals_have_the_mean_in_them() -> None:
    draw = random.Random(0)
    inside = 0
    for _ in range(2000):
        values = [draw.gauss(3.0, 2.0) for _ in range(5)]
        width = half_width(values)
        assert width is not None
        inside += abs(sum(values) / 5 - 3.0) <= width
    assert 0.935 < inside / 2000 < 0.965


def test_no_spread_is_no_interval() -> None:
    assert half_width([1.0]) is None and half_width([]) is None
    assert half_width([1.0, 1.0, 1.0]) is None
    assert half_width_of_means([0.3, 0.4]) == pytest.approx(0.25)
    assert half_width_of_means([0.3, None]) is None and half_width_of_means([]) is None
