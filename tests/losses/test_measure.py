"""`measure` against the oracle's metrics, for documents that lack any of their inputs, and over any micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from losses.label_cases import (
    CORRECTED,
    EXPLORING,
    LOSSES,
    Case,
    loss_name,
    make_case,
    make_labels,
    make_objective,
    oracle_inputs,
    without,
)
from oracles.step import Document, complete_loss_config, loss_terms, step_metrics
from truestep.losses.labels import Labels
from truestep.losses.measure import LOG_RATIO_EDGES, LOG_RATIO_PERCENTILES, StepFacts, measure_labels
from truestep.losses.objective import Objective
from truestep.metrics.types import Metric, merge, values
from truestep.types import StepTotals

INPUTS = ("old_logprobs", "advantages", "versions", "reward")
EVERY_COMBINATION = tuple(itertools.product((False, True), repeat=4))
COUNTED_BY_THE_STEP = (
    *("num_documents", "num_sequences", "num_labels", "num_tokens", "reward_std"),
    *("response_length", "max_response_length", "min_response_length"),
    *("response_length_rewarded", "response_length_unrewarded"),
)
SEEN = 1000  # documents, before the step
Flags = tuple[bool, ...]


@dataclass(frozen=True)
class Facts:
    """What a test says of documents beside their labels."""

    reward: torch.Tensor  # [D]
    model_version: torch.Tensor  # [T]
    documents_seen: int
    has_logprobs: torch.Tensor  # [D] bool
    has_advantages: torch.Tensor
    has_version: torch.Tensor
    has_reward: torch.Tensor


def measure(labels: Labels, objective: Objective, facts: Facts, level: str) -> dict[str, Metric]:
    has = {
        "logprobs": facts.has_logprobs,
        "advantages": facts.has_advantages,
        "model_version": facts.has_version,
        "reward": facts.has_reward,
        "truncated": torch.zeros_like(facts.has_reward),
    }
    labels = replace(labels, reward=facts.reward, model_version=facts.model_version, has=has)
    return measure_labels(labels, StepFacts(objective, facts.documents_seen, StepTotals(1, 1, 1)), level, {})


def make_facts(case: Case, flags: list[Flags], seed: int = 0) -> Facts:
    generator = torch.Generator().manual_seed(seed)
    present = torch.tensor(flags, dtype=torch.bool).reshape(-1, 4).unbind(1)
    return Facts(
        reward=torch.randn(len(case.counts), generator=generator, dtype=torch.float64),
        model_version=torch.randint(900, SEEN, (sum(case.counts),), generator=generator),
        documents_seen=SEEN,
        has_logprobs=present[0],
        has_advantages=present[1],
        has_version=present[2],
        has_reward=present[3],
    )


def clear_absent(labels: Labels, facts: Facts, absent: float = 0.0) -> Labels:
    """As packing does: `absent` stands where a document has no input."""
    keep_logprobs, keep_advantages = facts.has_logprobs[labels.document], facts.has_advantages[labels.document]
    return replace(
        labels,
        old_logprobs=torch.where(keep_logprobs, labels.old_logprobs, absent),
        advantages=torch.where(keep_advantages, labels.advantages, absent),
    )


def oracle_documents(documents: list[Document], facts: Facts, flags: list[Flags]) -> list[Document]:
    result, start = [], 0
    for index, (document, has) in enumerate(zip(documents, flags, strict=True)):
        count = len(document.positions)
        versions = facts.model_version[start : start + count].tolist()
        start += count
        document = replace(document, versions=versions, reward=float(facts.reward[index]))
        result.append(without(document, *(name for name, there in zip(INPUTS, has, strict=True) if not there)))
    return result


def check_against_oracle(case: Case, loss: dict[str, Any], flags: list[Flags]) -> None:
    options = complete_loss_config(loss)
    objective = make_objective(loss)
    facts = make_facts(case, flags)
    labels = clear_absent(make_labels(case, objective.denominator), facts)
    mine = values(measure(labels, objective, facts, "full"))
    documents, label_values = oracle_inputs(case, case.logits)
    terms = loss_terms(documents, label_values, options)
    documents = oracle_documents(documents, facts, flags)
    wanted = step_metrics(documents, label_values, terms, options, SEEN)
    # The loss of documents that lack what it needs is no loss: nobody trains on them.
    lacking = loss["type"] != "cross_entropy" and any(not (has[0] and has[1]) for has in flags)
    unchecked = {*COUNTED_BY_THE_STEP, *({"loss"} if lacking else ()), "policy_loss"}
    percentiles = {f"log_ratio_p{percentile}" for percentile in LOG_RATIO_PERCENTILES}
    assert set(mine) - percentiles - unchecked == set(wanted) - unchecked
    for name in set(wanted) - unchecked:
        value, scale = wanted[name]
        assert abs(mine[name] - value) <= 1e-11 * max(scale, 1e-30), name


@pytest.mark.parametrize("loss", LOSSES + CORRECTED, ids=loss_name)
def test_documents_that_each_lack_something_else(loss: dict[str, Any]) -> None:
    """All 16 combinations of inputs among the documents of one micro-batch, and each of them without labels."""
    for seed, shift in itertools.product(range(2), (0, 5)):
        counts = (5, 0, 1, 9, 2, 1, 14, 3, 3, 7, 4, 6, 1, 2, 8, 5)
        flags = [EVERY_COMBINATION[(index + shift) % 16] for index in range(16)]
        case = make_case((*counts, *(0,) * 16), seed=seed)
        check_against_oracle(case, loss, [*flags, *EVERY_COMBINATION])


@pytest.mark.parametrize("flags", EVERY_COMBINATION, ids=str)
def test_a_step_that_lacks_an_input_altogether(flags: Flags) -> None:
    for loss in (*LOSSES, *CORRECTED[::5]):
        check_against_oracle(make_case((3, 0, 5)), loss, [flags] * 3)
        check_against_oracle(make_case((0, 0)), loss, [flags] * 2)


@pytest.mark.parametrize(
    "loss", [LOSSES[0], LOSSES[2], LOSSES[4], LOSSES[6], *LOSSES[7:11], *CORRECTED[::5]], ids=loss_name
)
@pytest.mark.parametrize("absent", [float("nan"), float("inf"), -1e30])
def test_what_stands_for_an_absent_input_never_reaches_a_metric(loss: dict[str, Any], absent: float) -> None:
    case, objective = make_case((4, 6, 2)), make_objective(loss)
    facts = make_facts(case, [(True,) * 4, (False,) * 4, (True,) * 4])
    facts = replace(facts, reward=torch.where(facts.has_reward, facts.reward, absent))
    labels = make_labels(case, objective.denominator)
    zeros = values(measure(clear_absent(labels, facts), objective, facts, "full"))
    others = values(measure(clear_absent(labels, facts, absent), objective, facts, "full"))
    assert {name: value for name, value in others.items() if name not in ("loss", "policy_loss")} == {
        name: value for name, value in zeros.items() if name not in ("loss", "policy_loss")
    }


def test_the_levels() -> None:
    case, objective = make_case((3, 2)), make_objective({"type": "grpo", "z_loss": 0.1})
    facts, labels = make_facts(case, [(True,) * 4] * 2), make_labels(case, objective.denominator)
    none, basic, full = (set(measure(labels, objective, facts, level)) for level in ("none", "basic", "full"))
    assert none == {"loss", "new_logprobs", "policy_loss", "z_loss"}
    assert basic - none == {
        "old_logprobs", "ratio_new_old", "ratio_new_old_sum", "ratio_new_old_squared_sum", "kl_new_old",
        "clipped_ratio_fraction", "clipped_ratio_fraction_low", "clipped_ratio_fraction_high",
        "clipped_fraction", "clamped_ratios",
        "advantage",
        "max_advantage", "min_advantage", "reward", "max_reward", "min_reward", "staleness", "max_staleness",
        "min_staleness", "effective_sample_size", "effective_sample_share", "entropy", "logprob_advantage_covariance",
        "truncated_fraction", "zero_advantage_fraction",
    }  # fmt: skip
    assert full - basic == {f"log_ratio_p{percentile}" for percentile in LOG_RATIO_PERCENTILES}


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_log_ratio_percentiles(kind: str) -> None:
    """Against numpy, within the bin where the percentile lies."""
    case = make_case((2000, 0, 3000, 40), vocabulary=3) if kind == "grpo" else make_case((2,) * 3000, vocabulary=3)
    objective = make_objective({"type": kind})
    labels = make_labels(case, objective.denominator)
    log_ratios = objective.label_loss.log_ratio(labels).numpy()
    facts = make_facts(case, [(True,) * 4] * len(case.counts))
    metrics = values(measure(labels, objective, facts, "full"))
    for percentile in LOG_RATIO_PERCENTILES:
        wanted = float(np.percentile(log_ratios, percentile))
        at = int(torch.bucketize(wanted, LOG_RATIO_EDGES))
        below, above = LOG_RATIO_EDGES[at - 2].item(), LOG_RATIO_EDGES[at + 1].item()
        assert below <= metrics[f"log_ratio_p{percentile}"] <= above


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("log_ratio", [1e-6, 1e-4, -3e-3, 0.5, -20.0, -200.0])
def test_the_divergence_keeps_its_digits_in_float32(kind: str, log_ratio: float) -> None:
    """ρ - log ρ - 1 of a ratio near 1 is far below the rounding of ρ: the float32 log-probs are what it is of. And of
    a ratio that underflows, it is finite."""
    case, objective = make_case((4, 1), vocabulary=3), make_objective({"type": kind})
    facts, labels = make_facts(case, [(True,) * 4] * 2), make_labels(case, objective.denominator, torch.float32)
    old = torch.full_like(labels.logprobs, -0.5)
    labels = replace(labels, old_logprobs=old, logprobs=old + log_ratio)
    exact = (labels.logprobs.double() - labels.old_logprobs.double())[0]
    metric = values(measure(labels, objective, facts, "basic"))["kl_new_old"]
    assert metric == pytest.approx(float(exact.expm1() - exact), rel=1e-5)


def test_a_ratio_beyond_float32_fails_nothing() -> None:
    for kind in ("grpo", "gspo"):
        case, objective = make_case((3, 1)), make_objective({"type": kind, "dual_clip": 2.0})
        facts, labels = make_facts(case, [(True,) * 4] * 2), make_labels(case, objective.denominator, torch.float32)
        labels = replace(labels, old_logprobs=labels.old_logprobs - 500)
        metrics = values(measure(labels, objective, facts, "full"))
        assert np.isfinite(metrics["loss"])
        assert metrics["clipped_ratio_fraction_high"] == 1
        assert metrics["kl_new_old"] > 100


# Splitting a step's documents over micro-batches.


def micro_batch(case: Case, objective: Objective, facts: Facts, chosen: list[int]) -> dict[str, Metric]:
    """The metrics of some of the documents, numbered anew as packing numbers them; the totals are the step's."""
    whole = make_labels(case, objective.denominator)
    number = {document: place for place, document in enumerate(chosen)}
    rows = torch.cat([torch.nonzero(case.document == document)[:, 0] for document in chosen] + [torch.empty(0).long()])
    document = torch.tensor([number[int(index)] for index in case.document[rows]], dtype=torch.int64)
    documents = torch.tensor(chosen, dtype=torch.int64)
    of_documents = ("num_labels", "document_labels", "counts", "others_have_advantage", "truncated")
    known = {name: getattr(whole, name)[documents] for name in of_documents}
    labels = replace(whole[rows], document=document, **known)
    names = ("reward", "has_logprobs", "has_advantages", "has_version", "has_reward")
    per_document = {name: getattr(facts, name)[documents] for name in names}
    part = replace(facts, model_version=facts.model_version[rows], **per_document)
    return measure(clear_absent(labels, part), objective, part, "full")


@settings(max_examples=120, deadline=None)
@given(
    documents=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(EVERY_COMBINATION), st.integers(0, 3)), min_size=1, max_size=9
    ),
    loss=st.sampled_from(LOSSES + CORRECTED + EXPLORING),
    normalize_by=st.sampled_from(["labels", "documents", "document_means"]),
    seed=st.integers(0, 99),
)
def test_any_split_over_micro_batches_measures_the_same(
    documents: list[tuple[int, Flags, int]], loss: dict[str, Any], normalize_by: str, seed: int
) -> None:
    """Documents, what each has, and which of four micro-batches each is in; some of those are empty."""
    case = make_case([count for count, _, _ in documents], seed=seed, vocabulary=4)
    facts = make_facts(case, [flags for _, flags, _ in documents], seed)
    objective = make_objective(loss | {"normalize_by": normalize_by, "entropy_bonus": 0.1})
    wanted = values(micro_batch(case, objective, facts, list(range(len(documents)))))
    merged: dict[str, Metric] = {}
    for part in range(4):
        chosen = [index for index, (_, _, place) in enumerate(documents) if place == part]
        merged = merge(merged, micro_batch(case, objective, facts, chosen))
    assert values(merged) == {name: pytest.approx(value, rel=1e-12, abs=1e-13) for name, value in wanted.items()}
