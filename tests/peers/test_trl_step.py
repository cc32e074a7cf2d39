"""What `benchmarks/step.py --trl` gives to TRL is our step: the same loss, and a gradient of the same norm."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tiny
from peers.installed import needs_peers, run_worker
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.model.loading.load import load_policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.step.update.gradient_clipping import gradient_norm
from truestep.types import Rollout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOLERANCE = 1e-5

# Each way to cut the documents into batches and to pad them; 11 documents leave a last batch that is smaller.
FLOAT32: dict[str, Any] = {"bf16": False}
WAYS = (
    {"name": "as it comes, in float32", "padded_to": "step", "config": FLOAT32},
    {"name": "by length", "batch": 4, "by_length": True, "config": FLOAT32 | {"gradient_checkpointing": False}},
    {"name": "to a multiple", "batch": 2, "config": FLOAT32 | {"pad_to_multiple_of": 8}},
)


@pytest.fixture(scope="module")
def beside_trl() -> ModuleType:
    spec = importlib.util.spec_from_file_location("beside_trl", BENCHMARKS / "beside_trl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_documents() -> list[Rollout]:
    """Half of a document's tokens are labels; their ratios lie on both sides of both bounds."""
    generator = np.random.default_rng(0)
    documents = []
    for index in range(11):
        length = 20 + 7 * index % 31
        mask = np.arange(length) >= length // 2
        old = (-4 + 0.5 * generator.normal(size=length)).astype(np.float32)
        documents.append(
            Rollout(
                id=str(index),
                input_ids=generator.integers(0, tiny.VOCABULARY, length),
                loss_mask=mask,
                logprobs=np.where(mask, old, 0).astype(np.float32),
                advantages=np.where(mask, generator.normal(), 0).astype(np.float32),
            )
        )
    return documents


def our_step(model: Path, documents: list[Rollout]) -> tuple[float, float]:
    policy = load_policy(model, dtype="float32", device="cpu", head=HeadSettings(fp32=True))
    runner = StepRunner(policy, Objective(Grpo(0.2, 0.2), Denominator("labels")))
    done = runner.accumulate(plan_exactly(documents, StepRule(len(documents), False, 1, 1, 64), 0))
    return float(done.metrics["loss"].value()), float(gradient_norm(policy.weights))


@pytest.mark.nightly
@needs_peers
def test_trl_makes_our_step(beside_trl: ModuleType, tmp_path: Path) -> None:
    # A padding token's row of the embedding would have no gradient.
    model = tiny.make_model(tmp_path / "model", "qwen3_tied", pad_token_id=None)
    documents = make_documents()
    loss, norm = our_step(model, documents)
    given = {"model": str(model), "documents": beside_trl.as_given(documents), "steps": 1, "seconds": 300.0}
    rows = run_worker(str(BENCHMARKS / "step_trl.py"), given | {"settings": list(WAYS)}, tmp_path)
    assert [row["name"] for row in rows] == [way["name"] for way in WAYS]
    assert abs(loss) > 1e-3 and norm > 1e-3
    for row in rows:
        assert not row["error"] and row["tokens_per_second"] > 0
        of_loss, of_norm = abs(row["loss"] - loss) / abs(loss), abs(row["norm"] - norm) / norm
        print(f"{row['name']}: loss {of_loss:.1e}, norm {of_norm:.1e}")
        assert of_loss <= TOLERANCE and of_norm <= TOLERANCE
    assert rows[1]["padding"] < rows[0]["padding"]


@pytest.mark.nightly
@needs_peers
def test_a_row_that_fails_says_so_and_the_next_one_runs(beside_trl: ModuleType, tmp_path: Path) -> None:
    model = tiny.make_model(tmp_path / "model", "qwen3_tied", pad_token_id=None)
    given = {"model": str(model), "documents": beside_trl.as_given(make_documents()), "steps": 1, "seconds": 300.0}
    unknown = {"name": "unknown", "model": {"attn_implementation": "none such"}, "config": FLOAT32}
    rows = run_worker(str(BENCHMARKS / "step_trl.py"), given | {"settings": [unknown, WAYS[1]]}, tmp_path)
    assert "none such" in rows[0]["error"] and not rows[1]["error"]


def test_a_document_that_trl_cannot_have_is_refused(beside_trl: ModuleType) -> None:
    """Its completion is one span of labels up to its end, with one advantage."""
    document = make_documents()[0]
    (given,) = beside_trl.as_given([document])
    assert given["prompt"] == document.num_tokens - document.num_labels
    document.loss_mask[-1] = False
    with pytest.raises(AssertionError):
        beside_trl.as_given([document])


def test_ours_is_compared_with_the_fastest_row_that_ran(
    beside_trl: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"name": "as it comes", "tokens_per_second": 100.0, "gib": 1.0, "error": ""},
        {"name": "by hand", "tokens_per_second": 200.0, "gib": 1.0, "error": ""},
        {"name": "too large", "tokens_per_second": 0.0, "gib": 1.0, "error": "OutOfMemoryError"},
    ]
    beside_trl.print_beside(rows, 300.0, compiled=True)
    assert "1.500 times as many" in (best := capsys.readouterr().out) and "as it comes" not in best
    beside_trl.print_beside(rows, 300.0, compiled=False)
    assert "3.000 times as many" in capsys.readouterr().out
