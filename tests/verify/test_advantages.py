"""A scale over the whole step under `verify`: right over every kind of layout, and a scale of less is found by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from truestep.config.load import load_config
from truestep.rollouts.advantages import scale_over_step
from truestep.step.plan import plan
from truestep.tools.verify.judge import LayoutResult, verify
from truestep.tools.verify.report import complaints

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = ("one process", "smallest micro-batches", "FSDP 2", "FSDP 4, ragged ranks")


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


def scaled_over_the_first_half() -> None:
    """A rank that knows only a part of the step."""
    honest = scale_over_step
    plan.scale_over_step = (
        lambda documents, floor: [  # type: ignore[assignment]
            *honest(documents[: len(documents) // 2], floor),
            *honest(documents[len(documents) // 2 :], floor),
        ]
    )


def judge(examples: Path, layouts: tuple[str, ...], **options: object) -> list[LayoutResult]:
    config = load_config(examples / "grpo.yaml", ["--data.advantages=batch_normalized", "--model.dtype=float32"])
    return verify(config, Path("out"), only=lambda layout: layout.name in layouts, **options)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_scale_over_the_step_is_the_same_in_every_layout(examples: Path) -> None:
    verdicts = judge(examples, FEW)
    assert len(verdicts) >= len(FEW)
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


def test_a_scale_over_less_than_the_step_is_found_and_named(examples: Path) -> None:
    (verdict,) = judge(examples, ("one process",), plant=scaled_over_the_first_half)
    found = {difference.kind: difference.name for difference in verdict.wrong}
    assert "advantage" in found.get("metric", ""), complaints(verdict)
    assert "gradient" in found
