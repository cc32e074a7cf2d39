"""`data.zero_advantage: skip` changes no number, and saves the backward passes that it says it saves."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from documents import make_documents
from small_runs import file_config, quiet_trainer, read_lines, tokenised_model, write_lines, write_rollouts
from truestep.config.load import load_config
from truestep.head import chunked
from truestep.metrics.spent import of_the_machine
from truestep.step.compute import runner
from truestep.step.plan.plan import make_plan
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenised_model(tmp_path_factory.mktemp("zero") / "model", "llama")


def rollouts_with_zeros(directory: Path, every: int) -> Path:
    """Every so many documents have advantages, and the others advantages that are all 0."""
    records = write_rollouts(directory / "all.jsonl", 12, advantages="given")
    for index, record in enumerate(records):
        if index % every:
            record["advantage"] = 0.0
    return write_lines(directory / "rollouts.jsonl", records)


def step(model: Path, rollouts: Path, run: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Any:
    rows: list[int] = []
    honest = chunked.forward_backward

    def counted(head: Any, *arguments: Any, **options: Any) -> Any:
        rows.append(len(head.hidden))
        return honest(head, *arguments, **options)

    monkeypatch.setattr(chunked, "forward_backward", counted)
    trainer = quiet_trainer(file_config(model, rollouts, run, **sections))
    accumulated = trainer.runner.accumulate(trainer.plans.next().plan)
    gradients = {name: value.clone() for name, value in trainer.policy.weights.collect_gradients().items()}
    trainer.plans.close()
    monkeypatch.setattr(chunked, "forward_backward", honest)
    return accumulated.line(), gradients, sum(rows)


@pytest.mark.parametrize(
    ("loss", "every"), [("grpo", 2), ("gspo", 2), ("cispo", 100)], ids=["labels", "documents", "all but one"]
)
def test_no_result_changes(loss: str, every: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = rollouts_with_zeros(tmp_path, every)
    options: dict[str, Any] = {"loss": {"type": loss, "metrics": "full"}, "schedule": {"docs_per_step": 12}}
    kept, gradients, rows = step(model, rollouts, tmp_path / "kept", monkeypatch, **options)
    options["data"] = {"zero_advantage": "skip"}
    skipped, same, fewer = step(model, rollouts, tmp_path / "skipped", monkeypatch, **options)
    assert set(kept) == set(skipped)
    for name in {name for name in kept if not of_the_machine(name)} - {"num_micro_batches"}:
        assert skipped[name] == pytest.approx(kept[name], rel=1e-5, abs=1e-6), name
    for name, gradient in gradients.items():
        assert float((same[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-6), name
    assert any(float(gradient.norm()) > 0 for gradient in gradients.values())
    assert fewer < (0.8 if every == 2 else 0.4) * rows


def test_a_step_without_any_advantage_has_a_gradient_of_zero(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = write_rollouts(tmp_path / "all.jsonl", 6, advantages="given")
    rollouts = write_lines(tmp_path / "zero.jsonl", [record | {"advantage": 0} for record in records])
    options = {"schedule": {"docs_per_step": 6}, "data": {"zero_advantage": "skip"}}
    line, gradients, rows = step(model, rollouts, tmp_path / "run", monkeypatch, **options)
    assert rows == 0 and line["num_documents"] == 6 and line["new_logprobs"] < 0
    assert not any(torch.any(gradient) for gradient in gradients.values())


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    rollouts = tmp_path / "examples" / "rollouts.jsonl"
    lines = read_lines(rollouts)
    write_lines(rollouts, [line | {"reward": 1.0} if i % 8 < 4 else line for i, line in enumerate(lines)])
    monkeypatch.chdir(tmp_path)
    return tmp_path / "examples"


def every_document_looks_idle() -> None:
    runner.has_advantage = lambda document: False  # type: ignore[assignment]


LAYOUTS = ("FSDP 2", "pipeline 2")


def test_it_holds_in_every_layout(examples: Path) -> None:
    config = load_config(examples / "grpo.yaml", ["--data.zero_advantage=skip", "--model.dtype=float32"])
    verdicts = verify(config, Path("out"), only=lambda layout: layout.name in LAYOUTS)
    assert {verdict.layout.name for verdict in verdicts} == set(LAYOUTS)
    assert all(verdict.passed for verdict in verdicts), [complaints(verdict) for verdict in verdicts]


def test_a_skipped_document_that_has_an_advantage_is_found(examples: Path) -> None:
    config = load_config(examples / "grpo.yaml", ["--data.zero_advantage=skip", "--model.dtype=float32"])
    (verdict,) = verify(
        config, Path("out"), only=lambda layout: layout.name == "one process", plant=every_document_looks_idle
    )
    assert "gradient" in {difference.kind for difference in verdict.wrong}


def test_a_micro_batch_is_skipped_where_no_rank_has_an_advantage_in_it() -> None:
    documents = [
        replace(document, advantages=np.full(document.num_tokens, has, np.float32))
        for document, has in zip(make_documents([4, 4, 4, 4, 4, 4]), (0, 1, 1, 0, 0, 0), strict=True)
    ]
    plan = make_plan(documents, [[number] for number in range(6)], 0, ranks=2)
    assert [runner._no_advantage(plan, number) for number in range(3)] == [False, False, True]
