"""Labels that clip_cov and kl_cov hold back, and the entropy target: by hand, and over whole runs and layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from documents import make_documents
from losses.label_cases import labels_of
from oracles.step import oracle_logprobs, oracle_step
from scoring import check_against_oracle, loaded_once, run_score, write_records
from small_runs import file_config, quiet_trainer, read_lines, write_rollouts
from tiny import make_records, set_old_logprobs
from truestep.config.schema import Config
from truestep.losses.exploration import ClipCov, EntropyTarget, KlCov
from truestep.step.before.chosen import Chooser, covariances
from truestep.types import Rollout

Model = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    with loaded_once():
        yield


def document(name: str, logprobs: list[float], advantage: float) -> Rollout:
    """A prompt of one token, and labels."""
    mask = np.array([False, *[True] * len(logprobs)])
    values = np.array([0.0, *logprobs], np.float32)
    return Rollout(name, np.arange(len(mask)), mask, logprobs=values, advantages=np.where(mask, advantage, 0))


def chosen_of(documents: tuple[Rollout, ...]) -> set[tuple[str, int]]:
    return {(one.id, int(at)) for one in documents for at in np.flatnonzero(one.chosen)}


def test_the_covariance_of_each_label_by_hand() -> None:
    """Mean logπ -2, mean A 0.5: of the first label (-1 + 2) · (2 - 0.5)."""
    documents = (document("a", [-1.0, -3.0], 2.0), document("b", [-2.0, -2.0], -1.0))
    assert covariances(documents).tolist() == [1.5, -1.5, 0.0, 0.0]
    assert covariances(()).shape == (0,)


def test_kl_cov_chooses_the_highest_and_at_least_one() -> None:
    documents = (document("a", [-1.0, -3.0, -1.5], 2.0), document("b", [-2.0, -4.0], -1.0))
    assert chosen_of(Chooser(KlCov(0.01, 1.0), 0).choose(documents, 0)) == {("b", 2)}
    assert chosen_of(Chooser(KlCov(0.5, 1.0), 0).choose(documents, 0)) == {("b", 2), ("a", 1)}
    assert len(chosen_of(Chooser(KlCov(1.0, 1.0), 0).choose(documents, 0))) == 3, "and none of covariance below 0"


def test_clip_cov_chooses_at_random_within_the_band() -> None:
    documents = tuple(make_documents([40] * 20))
    flat = covariances(documents)
    owners = [(one.id, int(at)) for one in documents for at in np.flatnonzero(one.loss_mask)]
    inside = {owners[place] for place in np.flatnonzero((flat > 0.2) & (flat < 2.0))}
    picks = [chosen_of(Chooser(ClipCov(0.05, 0.2, 2.0), 3).choose(documents, seen)) for seen in range(30)]
    assert all(pick < inside and len(pick) == int(0.05 * len(flat)) for pick in picks)
    assert len({frozenset(pick) for pick in picks}) == 30, "another draw at every step"
    often = [sum(one in pick for pick in picks) for one in inside]
    assert max(often) < 15 < len(inside), "no label is preferred"
    assert picks[0] == chosen_of(Chooser(ClipCov(0.05, 0.2, 2.0), 3).choose(documents, 0))
    assert picks[0] != chosen_of(Chooser(ClipCov(0.05, 0.2, 2.0), 4).choose(documents, 0)), "another seed"


def test_a_step_without_labels_chooses_none() -> None:
    nothing = document("a", [], 1.0)
    for rule in (ClipCov(0.5, -1.0, 1.0), KlCov(0.5, 1.0)):
        assert chosen_of(Chooser(rule, 0).choose((nothing,), 0)) == set()


def test_the_slope_of_kl_cov_is_a_finite_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = -3 * torch.rand(2, 40, generator=generator, dtype=torch.float64)
    old[7] -= 30.0

    def term(logprobs: torch.Tensor) -> Any:
        known = {"document": torch.zeros(40, dtype=torch.int64), "num_labels": torch.tensor([40])}
        labels = labels_of(logprobs=logprobs, old_logprobs=old, **known)
        return KlCov(0.1, 1.0)(dataclasses.replace(labels, chosen=torch.arange(40) % 2))

    difference = (term(new + 1e-6).loss - term(new - 1e-6).loss) / 2e-6
    torch.testing.assert_close(term(new).slope, difference, rtol=1e-6, atol=1e-8)
    assert term(new).slope[7] == 0 and not term(new).loss[::2].any()


# Whole steps against the oracle. The band holds some labels of random records.
EXPLORING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("grpo", {"clip_cov": {"share": 0.1, "low": 0.2, "high": 2.0}}),
    ("gspo", {"clip_cov": {"share": 0.1, "low": 0.2, "high": 2.0}, "correction": {"type": "truncate", "high": 1.1}}),
    ("sapo", {"kl_cov": {"share": 0.2, "weight": 0.5}}),
    ("gmpo", {"kl_cov": {"share": 0.2}, "old_logprobs": "recompute"}),
    ("cispo", {"entropy_target": {"entropy": 1.0}, "entropy_bonus": 0.03, "kl_cov": {"share": 0.3}}),
    ("cross_entropy", {"entropy_target": {"entropy": 1.0}}),
)
LAYOUTS = ((1, 24, "labels"), (7, 50, "document_means"), ("auto", 1000, "documents"))


@pytest.mark.parametrize(("loss", "options"), EXPLORING, ids=lambda value: value if isinstance(value, str) else "")
def test_a_step_equals_the_oracle_at_every_layout(
    loss: str, options: dict[str, Any], tiny_model: Model, tmp_path: Path
) -> None:
    model = tiny_model("qwen3_tied")
    records = make_records(3, documents=12)
    records = set_old_logprobs(records, oracle_logprobs(model, records), seed=3)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    for chunk, budget, denominator in LAYOUTS:
        config = {
            "model": {"path": str(model), "dtype": "float32", "head": {"logits_chunk_size": chunk}},
            "loss": {"type": loss, "metrics": "full", "normalize_by": denominator, **options},
            "data": {"path": str(file), "advantages": "none", "tokens_per_microbatch": budget},
            "seed": 5,
        }
        scored = run_score(config, tmp_path / "out")
        check_against_oracle(scored, oracle_step(model, records, config))
        for name in {"clip_cov", "kl_cov"} & set(options):
            assert 0.05 < scored.step[f"{name}_fraction"] < 0.35
    if loss == "cross_entropy":
        assert scored.step["entropy_bonus_weight"] == 0 == scored.step["entropy_bonus"]


# The target over the steps of a run.


def test_the_weight_follows_the_entropy_and_keeps_its_bounds() -> None:
    target = EntropyTarget(entropy=0.5, rate=0.1, largest_weight=0.04)
    assert target.next_weight(0.01, 0.3) == pytest.approx(0.03)
    assert target.next_weight(0.03, 0.3) == 0.04
    assert target.next_weight(0.01, 0.55) == pytest.approx(0.005)
    assert target.next_weight(0.01, 1.5) == 0.0


def steered(model: Path, tmp_path: Path, name: str, **sections: Any) -> Config:
    target = {"entropy": 3.9, "rate": 0.05, "largest_weight": 0.2}
    loss = {"type": "grpo", "metrics": "none", "entropy_bonus": 0.01, "entropy_target": target}
    base: dict[str, Any] = {"loss": loss, "checkpoint": {"every": 2}, "deterministic": True}
    return file_config(model, tmp_path / "r.jsonl", tmp_path / name, **base | sections)


def test_each_step_has_the_weight_that_the_entropies_before_it_make(tiny_model: Model, tmp_path: Path) -> None:
    """At every level of metrics; and a run that goes on is bitwise the one that was never interrupted."""
    write_rollouts(tmp_path / "r.jsonl", 30)
    model = tiny_model("llama")
    try:
        quiet_trainer(steered(model, tmp_path, "whole")).run()
        quiet_trainer(steered(model, tmp_path, "cut", schedule={"docs_per_step": 5, "steps": 4})).run()
        quiet_trainer(steered(model, tmp_path, "cut")).run()
    finally:
        torch.use_deterministic_algorithms(False)
    whole, cut = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    weight = 0.01
    for line in whole:
        assert line["entropy_bonus_weight"] == weight
        weight = min(max(weight + 0.05 * (3.9 - line["entropy"]), 0.0), 0.2)
    weights = [line["entropy_bonus_weight"] for line in whole]
    assert len(set(weights)) == 6 and 0.0 < max(weights) < 0.2
    names = ("loss", "entropy", "entropy_bonus", "entropy_bonus_weight", "grad_norm")
    assert [[line[name] for name in names] for line in cut] == [[line[name] for name in names] for line in whole]


def test_a_target_moves_the_entropy(tmp_path: Path, tiny_model: Model) -> None:
    """Far above or below, over some steps on the same documents."""
    write_rollouts(tmp_path / "r.jsonl", 10)
    ends = {}
    for name, entropy in (("high", 10.0), ("low", 0.0)):
        target = {"entropy": entropy, "rate": 0.1, "largest_weight": 1.0}
        loss = {"type": "cross_entropy", "entropy_target": target}
        data = {"advantages": "group_mean", "epochs": 6}
        given = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / name, loss=loss, data=data)
        quiet_trainer(given).run()
        ends[name] = read_lines(tmp_path / name / "metrics.jsonl")[-1]
    assert ends["low"]["entropy_bonus_weight"] == 0.0 < ends["high"]["entropy_bonus_weight"]
    assert ends["high"]["entropy"] > ends["low"]["entropy"] + 0.05
