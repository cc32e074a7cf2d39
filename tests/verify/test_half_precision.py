"""The documents of layouts in half precision, whose rounding must not decide which of them are clipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from truestep.config.schema import Config
from truestep.run.assemble.step import make_objective
from truestep.tools.verify.case import Case, make_case
from truestep.tools.verify.judge import verify
from truestep.tools.verify.oracle.records import Record, read_document
from truestep.tools.verify.oracle.step import oracle_logprobs
from truestep.tools.verify.reduced import _switches
from truestep.tools.verify.reference import Reference


def options(model: Path, kind: str, dtype: str) -> Config:
    given = {
        "model": {"path": str(model), "dtype": dtype, "device": "cpu"},
        "loss": {"type": kind},
        "data": {"group_size": 4},
        "schedule": {"docs_per_step": 8, "steps": 3},
        "sampler": {"prompts": "p.jsonl", "reward": "a:b"},
    }
    return Config.model_validate(given)


def label_distances(case: Case, records: list[Record], config: Config, labels: int | None = None) -> list[list[float]]:
    """Of each bound, how far the values of each document's first `labels` labels are above it; None: of all."""
    new = oracle_logprobs(Reference(case.model), list(records))
    found: list[list[float]] = []
    for record, values in zip(records, new, strict=True):
        for place, (value, bound) in enumerate(_switches(make_objective(config), read_document(record, 1.0), values)):
            found += [[]] if place == len(found) else []
            found[place] += (value - bound)[:labels].tolist()
    return found


def distances(case: Case, records: list[Record], config: Config) -> list[list[float]]:
    """Of each bound, how far each document's value is above it."""
    return label_distances(case, records, config, 1)


def make(tiny_model: Callable[[str], Path], tmp_path: Path, kind: str, dtype: str) -> tuple[Case, Config]:
    config = options(tiny_model("llama"), kind, dtype)
    scratch = tmp_path / dtype
    scratch.mkdir()
    return make_case(config, scratch, documents=14, full=False), config


def test_documents_are_far_from_narrow_bounds_and_on_both_sides(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    case, config = make(tiny_model, tmp_path, "gspo", "bfloat16")
    assert case.half_records is not None
    for of_bound in distances(case, case.half_records, config):
        assert min(abs(distance) for distance in of_bound) > 0.09  # bfloat16 moves a mean by about a hundredth
        assert min(of_bound) < 0 < max(of_bound)
    usual = distances(case, case.records, config)
    assert all(min(abs(distance) for distance in of_bound) < 1e-2 for of_bound in usual)  # the fault that it mends


@pytest.mark.parametrize("kind", ["grpo", "dppo"])
def test_labels_are_far_from_their_bounds_and_on_both_sides(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A label that one layout clips and another does not is no fault of either."""
    case, config = make(tiny_model, tmp_path, kind, "bfloat16")
    assert case.half_records is not None
    for of_bound in label_distances(case, case.half_records, config):
        assert min(abs(distance) for distance in of_bound) > 0.024
        assert sum(distance < 0 for distance in of_bound) > 1 and sum(distance > 0 for distance in of_bound) > 1
    usual = label_distances(case, case.records, config)
    assert any(min(abs(distance) for distance in of_bound) < 0.024 for of_bound in usual)


def test_other_cases_are_drawn_as_ever(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    whole, _ = make(tiny_model, tmp_path, "gspo", "bfloat16")
    alone, _ = make(tiny_model, tmp_path, "gspo", "float32")
    assert whole.records == alone.records and alone.half_records is None
    (tmp_path / "labels").mkdir()
    labels, _ = make(tiny_model, tmp_path / "labels", "grpo", "bfloat16")
    # In half precision every second record does not begin as the one before.
    assert labels.half_records is not None
    ids = [[record["input_ids"] for record in records[::2]] for records in (labels.half_records, labels.records)]
    assert ids[0] == ids[1]


@pytest.mark.long
def test_gspo_passes_in_half_precision(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = options(tiny_model("llama"), "gspo", "bfloat16")
    verdicts = verify(config, Path("out"), most_ranks=2, only=lambda layout: False)
    assert len(verdicts) == 4 and all(verdict.passed for verdict in verdicts), verdicts
