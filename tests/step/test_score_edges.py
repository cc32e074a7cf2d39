"""The steps where trainers divide by zero, lose a label or leak a value: each against the oracle.

A loss of labels, one of documents, one of documents that corrects each label, and one without ratios stand for all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oracles.step import oracle_step
from scoring import Scored, check_against_oracle, loaded_once, run_score, write_records
from step.test_score_oracle import OPTIONS, config_for, records_for

Model = Callable[[str], Path]
WITH_ADVANTAGES = ("grpo", "gspo", "gmpo")
SOME = (*WITH_ADVANTAGES, "cross_entropy")


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    with loaded_once():
        yield


def score_and_check(
    model: Path, records: list[dict[str, Any]], loss: dict[str, Any], directory: Path, **data: Any
) -> Scored:
    directory.mkdir(exist_ok=True)
    file = write_records(directory / "rollouts.jsonl", records)
    config = config_for(model, file, loss, **data)
    config["model"]["head"] = {"logits_chunk_size": 3}
    scored = run_score(config, directory / "out")
    check_against_oracle(scored, oracle_step(model, records, config))
    return scored


def options_of(loss: str) -> dict[str, Any]:
    return {"type": loss, "entropy_bonus": 0.05, "z_loss": 0.01, **OPTIONS[loss]}


@pytest.mark.parametrize("loss", SOME)
def test_a_step_of_one_document(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    for number, record in enumerate(records_for(model, loss)[:2]):
        score_and_check(model, [record], options_of(loss), tmp_path / str(number))


@pytest.mark.parametrize("loss", SOME)
def test_a_step_without_any_label(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    silent = [
        {
            "id": f"silent-{number}",
            "input_ids": [5, 6, 7 + number],
            "prompt_length": 3,
            "logprobs": [],
            "advantage": 1.0,
        }
        for number in range(3)
    ]
    scored = score_and_check(model, silent, options_of(loss), tmp_path)
    assert scored.step["num_documents"] == 3
    assert scored.step["loss"] == 0
    assert all(not gradient.any() for gradient in scored.gradients.values())
    assert [document["logprobs"] for document in scored.documents] == [[], [], []]


@pytest.mark.parametrize("loss", SOME)
def test_documents_without_labels_count_in_the_documents_and_nowhere_else(
    loss: str, tiny_model: Model, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    records = records_for(model, loss)
    silent = {"id": "silent", "input_ids": [5] * 20, "prompt_length": 20, "logprobs": [], "advantage": 1.0}
    options = options_of(loss) | {"normalize_by": "labels"}
    without = score_and_check(model, records, options, tmp_path / "without")
    joined = score_and_check(model, [silent, *records], options, tmp_path / "joined")
    assert joined.step["num_documents"] == without.step["num_documents"] + 1
    assert joined.step["loss"] == pytest.approx(without.step["loss"], rel=1e-6)
    by_documents = options | {"normalize_by": "documents"}
    score_and_check(model, [silent, *records], by_documents, tmp_path / "documents")


@pytest.mark.parametrize("loss", WITH_ADVANTAGES)
def test_all_advantages_zero(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("qwen3_tied")
    records = [record | {"advantage": 0.0} for record in records_for(model, loss)]
    scored = score_and_check(model, records, {"type": loss, **OPTIONS[loss]}, tmp_path)
    assert scored.step["loss"] == 0
    assert scored.step["grad_norm"] == 0


@pytest.mark.parametrize("rule", ["group_mean", "group_normalized", "leave_one_out"])
def test_a_group_of_one_has_no_baseline_and_no_advantage(rule: str, tiny_model: Model, tmp_path: Path) -> None:
    model, loss = tiny_model("llama"), "grpo"
    records = records_for(model, loss, advantages="rewards")
    for number, record in enumerate(records):
        record["group_id"] = str(number)
    scored = score_and_check(model, records, {"type": loss, **OPTIONS[loss]}, tmp_path, advantages=rule)
    assert scored.step["grad_norm"] == 0


POISON = (math.nan, -math.inf, 1e30, None)


def poisoned(records: list[dict[str, Any]], poison: float | None) -> list[dict[str, Any]]:
    """The same documents with a value at every place that is off the mask."""
    changed = copy.deepcopy(records)
    for record in changed:
        length = len(record["input_ids"])
        mask = record.get("loss_mask") or [int(t >= record["prompt_length"]) for t in range(length)]
        for field in ("logprobs", "advantage"):
            values = record.get(field)
            if isinstance(values, list) and len(values) == length:
                record[field] = [value if label else poison for value, label in zip(values, mask, strict=True)]
    return changed


def identical(first: Scored, second: Scored) -> bool:
    return (
        first.step == second.step
        and first.documents == second.documents
        and all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)
    )


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_no_value_off_the_mask_changes_a_bit(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    records = records_for(model, loss)
    # Per-token fields of full length, so that there are places to poison in every document.
    for record in records:
        length = len(record["input_ids"])
        if not isinstance(record["advantage"], list):
            record["advantage"] = [record["advantage"]] * length
    clean = score_and_check(model, records, options_of(loss), tmp_path / "clean")
    for number, poison in enumerate(POISON):
        scored = score_and_check(model, poisoned(records, poison), options_of(loss), tmp_path / str(number))
        assert identical(clean, scored), f"{poison} off the mask reached a result"


def test_a_ratio_exactly_on_both_bounds_takes_the_unclipped_gradient(tiny_model: Model, tmp_path: Path) -> None:
    """Both ε = 0 and the very log-probs that this model gives: every ratio is 1, on both bounds at once."""
    model = tiny_model("qwen3_tied")
    records = records_for(model, "grpo")
    file = write_records(tmp_path / "first.jsonl", records)
    first = run_score(config_for(model, file, {"type": "grpo"}), tmp_path / "first")
    for record, document in zip(records, first.documents, strict=True):
        record["logprobs"] = document["logprobs"]
    again = write_records(tmp_path / "again.jsonl", records)
    closed = run_score(config_for(model, again, {"type": "grpo", "epsilon_low": 0, "epsilon_high": 0}), tmp_path / "a")
    open_wide = run_score(config_for(model, again, {"type": "reinforce"}), tmp_path / "b")
    assert closed.step["ratio_new_old_sum"] == closed.step["num_labels"]
    assert closed.step["clipped_ratio_fraction"] == 0
    assert closed.step["grad_norm"] > 0
    for name, gradient in closed.gradients.items():
        torch.testing.assert_close(gradient, open_wide.gradients[name], rtol=1e-6, atol=1e-9)
