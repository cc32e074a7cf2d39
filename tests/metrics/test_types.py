"""Metrics merged from any parts in any order equal those of the whole; what measured nothing is absent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from truestep.losses.measure import effective_sample_size
from truestep.metrics.types import Derived, Histogram, Max, Mean, Metric, Min, Sum, merge, values

EDGES = torch.linspace(-4, 4, 33, dtype=torch.float64)
Number = st.floats(-1e3, 1e3, allow_nan=False)


def metrics_of(items: Sequence[float], *, as_tensors: bool) -> dict[str, Metric]:
    """Every type of metric of some labels; nothing where there is no label."""
    vector = torch.tensor(items, dtype=torch.float64)
    total, squares = vector.sum(), vector.square().sum()
    largest = vector.max() if items else torch.tensor(-math.inf, dtype=torch.float64)
    smallest = vector.min() if items else torch.tensor(math.inf, dtype=torch.float64)
    count = torch.tensor(len(items))
    numbers = [total, squares, largest, smallest, count]
    total, squares, largest, smallest, count = numbers if as_tensors else [number.item() for number in numbers]
    return {
        "sum": Sum(total),
        "mean": Mean(total, count),
        "max": Max(largest),
        "min": Min(smallest),
        "effective": Derived((Sum(total), Sum(squares)), effective_sample_size),
        "median": Histogram.of(vector, EDGES, 50),
    }


@given(st.lists(st.lists(Number, max_size=5), min_size=1, max_size=6), st.booleans(), st.randoms())
def test_any_split_merges_to_the_whole(parts: list[list[float]], as_tensors: bool, random: object) -> None:
    whole = values(metrics_of([item for part in parts for item in part], as_tensors=as_tensors))
    random.shuffle(parts)  # type: ignore[attr-defined]
    pieces = [metrics_of(part, as_tensors=as_tensors) for part in parts]
    forwards = values(reduce(merge, pieces))
    backwards = values(reduce(lambda after, before: merge(before, after), reversed(pieces)))
    for merged in (forwards, backwards):
        assert set(merged) == set(whole)
        for name in ("sum", "mean"):
            if name in whole:
                assert merged[name] == pytest.approx(whole[name], rel=1e-12, abs=1e-9)
        for name in {"max", "min", "median"} & set(whole):
            assert merged[name] == whole[name], "no reduction of these rounds"


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 20))
def test_effective_sample_size_is_of_the_whole(weights: list[float], cut: int) -> None:
    parts = [metrics_of(part, as_tensors=True) for part in (weights[:cut], weights[cut:])]
    wanted = math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights)
    assert values(merge(*parts))["effective"] == pytest.approx(wanted, rel=1e-12)


def test_a_mean_is_no_mean_of_means() -> None:
    assert Mean(10.0, 1).merge(Mean(2.0, 3)).value() == 3.0
    assert Mean(10.0, 1).merge(Mean(0.0, 0)).value() == 10.0
    assert Mean(torch.tensor(10.0), torch.tensor(1)).merge(Mean(2.0, 3)).value() == 3.0


def test_what_measured_nothing_is_absent() -> None:
    nothing = metrics_of([], as_tensors=True)
    assert values(nothing) == {"sum": 0.0}
    assert values(merge(nothing, nothing)) == {"sum": 0.0}
    something = metrics_of([-2.0], as_tensors=True)
    for merged in (merge(nothing, something), merge(something, nothing)):
        assert values(merged) == values(something)
        assert values(merged)["max"] == values(merged)["min"] == -2.0


@pytest.mark.parametrize("kind", [Max, Min])
@pytest.mark.parametrize("as_tensors", [True, False])
def test_a_nan_is_kept_wherever_it_stands(kind: type[Max] | type[Min], as_tensors: bool) -> None:
    def of(value: float) -> Max | Min:
        return kind(torch.tensor(value, dtype=torch.float64) if as_tensors else value)

    nan, nothing = of(math.nan), of(-math.inf if kind is Max else math.inf)
    for merged in (nan.merge(of(1.0)), of(1.0).merge(nan), nan.merge(nothing), nothing.merge(nan)):
        assert math.isnan(merged.value() or 0.0)
    assert nothing.merge(nothing).value() is None


@pytest.mark.parametrize("kind", [Max, Min])
def test_extremes_keep_their_digits(kind: type[Max] | type[Min]) -> None:
    """0.1 is no float32, and 16,777,217 (documents seen, say) neither."""
    for value in (0.1, 16_777_217.0):
        tensor = torch.tensor(value, dtype=torch.float64)
        assert kind(value).merge(kind(value)).value() == value
        assert kind(value).merge(kind(tensor)).value() == value
        assert kind(tensor).merge(kind(value)).value() == value


@pytest.mark.parametrize("percentile", [1, 5, 25, 50, 75, 95, 99, 100])
@pytest.mark.parametrize("parts", [1, 7])
def test_percentiles_of_dense_data_are_numpys(percentile: float, parts: int) -> None:
    """A normal distribution without noise, shuffled: its interpolation within a bin is far better than the bin."""
    edges = torch.linspace(-5, 5, 401, dtype=torch.float64)
    places = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    data = np.random.default_rng(0).permutation(torch.special.ndtri(places).numpy())
    split = [Histogram.of(torch.from_numpy(part.copy()), edges, percentile) for part in np.array_split(data, parts)]
    value = reduce(Histogram.merge, split).value()
    width = float(edges[1] - edges[0])
    assert value == pytest.approx(np.percentile(data, percentile), abs=width if percentile == 100 else width / 20)


def test_a_percentile_lies_in_the_bin_of_its_only_value() -> None:
    for value in (-3.9, -0.01, 0.3, 2.0):
        at = Histogram.of(torch.tensor([value], dtype=torch.float64), EDGES, 50).value()
        assert at == pytest.approx(value, abs=0.25)


def test_beyond_the_edges_a_percentile_is_the_edge() -> None:
    assert Histogram.of(torch.tensor([-1e9, -5.0, 5.0]).double(), EDGES, 1).value() == -4.0
    assert Histogram.of(torch.tensor([-5.0, 5.0, 1e9, math.inf]).double(), EDGES, 99).value() == 4.0


def test_a_histogram_of_a_point_mass_far_from_the_edges_keeps_every_count() -> None:
    merged = Histogram.of(torch.zeros(0).double(), EDGES, 50).merge(
        Histogram.of(torch.full((10,), 0.3).double(), EDGES, 50)
    )
    assert float(merged.counts.sum()) == 10
    assert len(merged.counts) == len(EDGES) + 1


def test_merge_keeps_what_only_one_side_has_and_changes_neither() -> None:
    first: dict[str, Metric] = {"a": Sum(1.0), "b": Mean(4.0, 2)}
    second: dict[str, Metric] = {"b": Mean(8.0, 1), "c": Max(3.0)}
    assert values(merge(first, second)) == {"a": 1.0, "b": 4.0, "c": 3.0}
    assert values(first) == {"a": 1.0, "b": 2.0}
    assert values(second) == {"b": 8.0, "c": 3.0}
