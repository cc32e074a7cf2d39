"""Recomputed old log-probs and the divergence from a reference: exact where they must be, and found again after a
restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from documents import make_documents
from oracles.step import oracle_logprobs, oracle_step
from scoring import check_against_oracle, run_score, write_records
from small_runs import file_config, quiet_trainer, read_lines, tell, write_rollouts
from tiny import make_model, make_records, set_old_logprobs
from truestep.config.schema import Config
from truestep.losses.labels import Labels
from truestep.losses.reference import KlReference
from truestep.run.directory import RunError
from truestep.run.trainer import Trainer
from truestep.step.before.annotators import Annotators, OwnLogprobs, ReferenceLogprobs
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import DocumentScore

Model = Callable[[str], Path]


def score_config(model: Path, records: Path, loss: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "head": {"logits_chunk_size": 7}},
        "loss": {"metrics": "full", **loss},
        "data": {"path": str(records), "advantages": "none", "tokens_per_microbatch": 50},
    }


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_the_recomputed_ratio_is_exactly_1_before_the_first_update(
    loss: str, tiny_model: Model, tmp_path: Path
) -> None:
    """Also of records without the sampler's log-probs, which this loss then does not need."""
    write_rollouts(tmp_path / "r.jsonl", 10, with_logprobs=False)
    options = {"type": loss, "old_logprobs": "recompute"}
    schedule = {"docs_per_step": 5, "updates_per_batch": 2}
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", loss=options, schedule=schedule)
    quiet_trainer(config).run()
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["ratio_new_old"] == 1.0 and line["kl_new_old"] == 0.0 for line in lines] == [True, False] * 2
    assert all("ratio_old_sampler" not in line for line in lines)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_the_divergence_from_the_policy_itself_is_exactly_0(estimator: str, tiny_model: Model, tmp_path: Path) -> None:
    model = tiny_model("qwen3_tied")
    file = write_records(tmp_path / "r.jsonl", make_records(3))
    loss = {"type": "gspo", "kl_reference": {"weight": 0.3, "estimator": estimator}}
    scored = run_score(score_config(model, file, loss), tmp_path / "out")
    assert scored.step["kl_reference"] == 0.0 and scored.step["kl_new_reference"] == 0.0


@pytest.mark.parametrize(
    "options",
    [{"estimator": "k1"}, {"estimator": "k2"}, {"estimator": "k3"}, {"estimator": "unbiased"}, {"in": "reward"}],
    ids=str,
)
def test_the_divergence_equals_the_oracle(options: dict[str, Any], tiny_model: Model, tmp_path: Path) -> None:
    """From a model, and from the same log-probs in the records."""
    model, reference = tiny_model("llama"), make_model(tmp_path / "reference", "llama", seed=4)
    records = make_records(3)
    records = set_old_logprobs(records, oracle_logprobs(model, records), seed=3)
    theirs = oracle_logprobs(reference, records)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    loss = {"type": "grpo", "kl_reference": {"weight": 0.3, "path": str(reference), **options}}
    config = score_config(model, file, loss)
    given = [record | {"reference_logprobs": values} for record, values in zip(records, theirs, strict=True)]
    wanted = oracle_step(model, given, config)
    check_against_oracle(run_score(config, tmp_path / "out"), wanted)
    of_records = write_records(tmp_path / "given.jsonl", given)
    loss = {"type": "grpo", "kl_reference": {"weight": 0.3, "path": "records", **options}}
    check_against_oracle(run_score(score_config(model, of_records, loss), tmp_path / "out"), wanted)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "unbiased"])
def test_slopes_are_finite_differences(estimator: str) -> None:
    from losses.label_cases import labels_of

    generator = torch.Generator().manual_seed(0)
    new, old, reference = -3 * torch.rand(3, 40, generator=generator, dtype=torch.float64)

    def term(logprobs: torch.Tensor) -> Any:
        labels: Labels = labels_of(
            logprobs=logprobs,
            old_logprobs=old,
            reference_logprobs=reference,
            document=torch.zeros(40, dtype=torch.int64),
            num_labels=torch.tensor([40]),
        )
        return KlReference(1.0, estimator)(labels)

    difference = (term(new + 1e-6).loss - term(new - 1e-6).loss) / 2e-6
    torch.testing.assert_close(term(new).slope, difference, rtol=1e-6, atol=1e-8)


def resumable(model: Path, tmp_path: Path, name: str, steps: int) -> Config:
    return file_config(
        model,
        tmp_path / "r.jsonl",
        tmp_path / name,
        loss={"type": "grpo", "old_logprobs": "recompute", "kl_reference": {"weight": 0.1}},
        schedule={"docs_per_step": 5, "updates_per_batch": 2, "steps": steps},
        checkpoint={"every": 1},
        deterministic=True,
    )


def test_a_run_that_goes_on_is_the_one_that_was_never_interrupted(tiny_model: Model, tmp_path: Path) -> None:
    """It stops between two updates on the same documents: their old log-probs and the reference's are of before."""
    write_rollouts(tmp_path / "r.jsonl", 10)
    model = tiny_model("llama")
    try:
        quiet_trainer(resumable(model, tmp_path, "whole", 4)).run()
        quiet_trainer(resumable(model, tmp_path, "cut", 3)).run()
        quiet_trainer(resumable(model, tmp_path, "cut", 4)).run()
    finally:
        torch.use_deterministic_algorithms(False)
    names = ("loss", "kl_reference", "ratio_new_old", "kl_new_reference", "grad_norm")
    whole, cut = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert [[line[name] for name in names] for line in cut] == [[line[name] for name in names] for line in whole]
    assert whole[0]["kl_reference"] == 0.0 and whole[3]["kl_reference"] > 0.0
    assert whole[3]["ratio_new_old"] != 1.0


def test_first_weights_that_have_changed_are_refused_by_name(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    write_rollouts(tmp_path / "r.jsonl", 10)
    try:
        quiet_trainer(resumable(model, tmp_path, "run", 1)).run()
        make_model(tmp_path / "model", "llama", seed=9)
        with pytest.raises(RunError, match=r"the run began with the weights of .*model"):
            quiet_trainer(resumable(model, tmp_path, "run", 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert json.loads((tmp_path / "run/first_weights.json").read_text())["path"] == str(model.resolve())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_reference_is_away_between_uses_and_changes_no_number(
    dtype: str, tiny_model: Model, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 10)
    model, lines = tiny_model("qwen3_tied"), {}
    for offload in (False, True):
        config = resumable(model, tmp_path, str(offload), 3)
        changes = {"loss.kl_reference.offload": offload, "model.dtype": dtype, "deterministic": False}
        trainer = quiet_trainer(config.changed(changes))
        frozen = reference_of(trainer).policy.weights.frozen
        sizes: list[int] = []
        tell(trainer, gradient=lambda *_, f=frozen, s=sizes: s.append(held(f)))
        assert (held(frozen) == 0) == offload
        trainer.run()
        assert len(sizes) == 3 and all((size == 0) == offload for size in sizes) and (held(frozen) == 0) == offload
        lines[offload] = read_lines(tmp_path / str(offload) / "metrics.jsonl")
    names = ("loss", "kl_reference", "kl_new_reference", "reference_logprobs", "grad_norm")
    assert [[line[n] for n in names] for line in lines[True]] == [[line[n] for n in names] for line in lines[False]]
    assert lines[True][0]["kl_reference"] == 0.0 < lines[True][2]["kl_reference"]


def reference_of(trainer: Trainer) -> StepRunner:
    (reference,) = [each for each in trainer.annotators.all if isinstance(each, ReferenceLogprobs)]
    return reference.runner


def held(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def test_a_reference_has_no_gradients(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 10)
    trainer = quiet_trainer(resumable(tiny_model("llama"), tmp_path, "run", 2))
    torch.use_deterministic_algorithms(False)
    reference = reference_of(trainer)
    assert not reference.policy.weights.master
    before = {name: part.clone() for name, part in reference.policy.weights.frozen.items()}
    trainer.run()
    assert all(torch.equal(before[name], part) for name, part in reference.policy.weights.frozen.items())


def test_old_logprobs_are_those_of_the_first_of_many_updates() -> None:
    annotators, plan = Annotators([OwnLogprobs()]), make_plan(make_documents([4, 6]), [[0, 1]], 0)
    for update in range(3):
        step = annotators.annotate(replace(plan, repeated=update > 0))
        kept = [document.recomputed_logprobs for document in step.documents]
        if update:
            values = [one[document.loss_mask] for one, document in zip(kept, step.documents, strict=True)]
            assert all((value == -1.0).all() for value in values)
        else:
            assert kept == [None, None]
        own = [np.full(document.num_labels, -1.0 - update, np.float32) for document in step.documents]
        annotators.computed(
            step, [DocumentScore(document.id, one, one) for document, one in zip(step.documents, own, strict=True)]
        )
