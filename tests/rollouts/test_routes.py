"""Experts that records name are checked against the model that is to replay them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.rollouts.values import BadRecord
from truestep.types import Rollout, RouteShape

MODEL = RouteShape((4, 4), 2, name="TinyMoe")
RECORD: dict[str, Any] = {"id": "a", "input_ids": [5, 6, 7, 8], "prompt_length": 2}
RIGHT = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 2], [3, 1]]])


def parsed(routes: Any, model: RouteShape | None = MODEL) -> Rollout:
    given = {} if routes is None else {"routed_experts": routes.tolist()}
    return parse_record(RECORD | given, "here", Checks(Needs(False, False, "none"), routes=model))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_may_be_missing_at_the_end(rows: int) -> None:
    assert np.array_equal(parsed(RIGHT[:rows]).token_fields["routed_experts"], RIGHT[:rows])
    assert "routed_experts" not in parsed(None).token_fields


def changed(place: tuple[int, ...], expert: int) -> np.ndarray:
    routes = RIGHT.copy()
    routes[place] = expert
    return routes


@pytest.mark.parametrize(
    ("routes", "model", "reason"),
    [
        (RIGHT[:, :1], MODEL, "has 1 layers: TinyMoe routes in 2, and layers that do not route have no row"),
        (np.repeat(RIGHT, 2, axis=1), MODEL, "routed_experts has 4 layers: TinyMoe routes in 2"),
        (RIGHT[:, :, :1], MODEL, "routed_experts has 1 experts of a token: TinyMoe chooses 2"),
        (changed((1, 0, 1), 4), MODEL, "routed_experts[1][0][1] is 4: TinyMoe has 4 experts in a layer"),
        (changed((2, 1, 0), 1), MODEL, "routed_experts[2][1] names an expert twice"),
        (RIGHT, RouteShape((), 0, name="Dense"), "is given, but Dense has no layer that can replay it"),
        (RIGHT[:2], RouteShape((4, 4), 2, True), "routed_experts has 2 rows: model.experts.replay: require needs 3"),
        (None, RouteShape((4, 4), 2, True), "routed_experts has 0 rows: model.experts.replay: require needs 3"),
    ],
)  # fmt: skip
def test_experts_of_another_model_are_refused(routes: Any, model: RouteShape, reason: str) -> None:
    with pytest.raises(BadRecord) as error:
        parsed(routes, model)
    assert reason in error.value.reason


def test_off_reads_no_experts() -> None:
    assert parsed(RIGHT[:, :1], None).token_fields["routed_experts"].shape == (3, 1, 2)
    assert parsed(RIGHT, RouteShape((4, 4), 2, True)).num_tokens == 4
