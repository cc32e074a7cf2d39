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


def distances(case: Case, records: list[Record], config: Config) -> list[list[float]]:
    """Of each bound, how far each document's value is above it."""
    new = oracle_logprobs(Reference(case.model), list(records))
    found: list[list[float]] = []
    for record, values in zip(records, new, strict=True):
        switches = _switches(make_objective(config), read_document(record, 1.0), values)
        found.append([float((value - bound)[0]) for value, bound in switches])
    return [list(of_bound) for of_bound in zip(*found, strict=True)]


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


def test_other_cases_are_drawn_as_ever(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    whole, _ = make(tiny_model, tmp_path, "gspo", "bfloat16")
    alone, _ = make(tiny_model, tmp_path, "gspo", "float32")
    assert whole.records == alone.records and alone.half_records is None
    (tmp_path / "labels").mkdir()
    labels, _ = make(tiny_model, tmp_path / "labels", "grpo", "bfloat16")
    # Bounds of labels are wider than what bfloat16 rounds. Every second record begins as the one before, but not here.
    assert labels.half_records is not None
    assert labels.half_records[::2] == labels.records[::2]


@pytest.mark.long
def test_gspo_passes_in_half_precision(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = options(tiny_model("llama"), "gspo", "bfloat16")
    verdicts = verify(config, Path("out"), most_ranks=2, only=lambda layout: False)
    assert len(verdicts) == 4 and all(verdict.passed for verdict in verdicts), verdicts
