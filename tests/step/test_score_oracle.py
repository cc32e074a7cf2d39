"""`score` in float32 against the independent float64 plain-loop oracle: every architecture, loss and denominator.

Each denominator has another chunk size and packing budget, one of each kind. That no layout changes a result is
verify/test_layouts.py.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oracles.step import oracle_logprobs, oracle_step, oracle_steps
from scoring import Scored, check_against_oracle, loaded_once, run_score, write_records
from selection import in_tiers, long_except
from sequences import in_documents, with_turns
from tiny import make_records, set_old_logprobs
from truestep.config.custom import load_custom
from truestep.tools.verify.case import _called_with_records

LOSSES = ("grpo", "gspo", "reinforce", "cispo", "cross_entropy", "sapo", "gmpo", "dppo")
DENOMINATORS: tuple[dict[str, Any], ...] = (
    {"normalize_by": "labels"},
    {"normalize_by": "documents"},
    {"normalize_by": "document_means"},
    {"normalize_by": "constant", "max_labels": 20},
)
# A loss of labels and one of whole documents, each with another kind of model: what `make test` has.
SHORT = (("qwen3_tied", "grpo"), ("gemma2", "gspo"))
# What the other losses make of their labels is tested on label vectors (tests/losses); here each is run once.
PAIRS = (
    *SHORT,
    ("llama", "cross_entropy"),
    ("qwen3", "cispo"),
    ("gemma2", "reinforce"),
    *(("qwen3_tied", loss) for loss in LOSSES[5:]),
)
# The chunk size and the packing budget of each denominator.
LAYOUTS: tuple[tuple[Any, int], ...] = ((7, 24), ("auto", 50), (1, 1000), ("auto", 24))


# Where each loss has its kinks: ratios lie on both sides of every one of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 1.5},
    "gspo": {"epsilon_low": 0.003, "epsilon_high": 0.004, "dual_clip": 1.02},
    "reinforce": {"ratio_cap": 1.3},
    "cispo": {"epsilon_low": 0.3, "epsilon_high": 0.2},
    "sapo": {"tau_positive": 2.0, "tau_negative": 3.0},
    "gmpo": {"epsilon_low": 0.2, "epsilon_high": 0.15},
    "dppo": {"divergence": "kl", "threshold": 1e-4},
    "cross_entropy": {},
}
BOUNDS = {
    "grpo": {"spread": 0.4, "bounds": (0.8, 1.28, 1.5)},
    "gspo": {"level": "document", "spread": 0.05, "bounds": (0.997, 1.004)},
    "reinforce": {"bounds": (0.8, 1.3)},
    "cispo": {"bounds": (0.7, 1.2)},
    "sapo": {},
    "gmpo": {"bounds": (math.exp(-0.2), math.exp(0.15))},
    "dppo": {},
    "cross_entropy": {},
}

# Every kind and level of correction, each with another loss. Their bounds lie inside the drawn ratios.
CORRECTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("grpo", {"correction": {"type": "truncate", "level": "label", "high": 1.1}}),
    ("cispo", {"correction": {"type": "truncate", "level": "label", "low": 0.9, "high": 1.1}}),
    ("sapo", {"correction": {"type": "mask", "level": "label", "low": 0.8, "high": 1.3}}),
    ("reinforce", {"correction": {"type": "reject", "level": "label", "low": 0.8, "high": 1.3}}),
    ("dppo", {"correction": {"type": "truncate", "level": "document", "high": 1.2}}),
    ("gspo", {"correction": {"type": "mask", "level": "document", "low": 0.97, "high": 1.03}}),
    ("cispo", {"correction": {"type": "reject", "level": "document_mean", "low": 0.95, "high": 1.05}}),
    (
        "gmpo",
        {"correction": {"type": "mask", "level": "document_mean", "low": 0.9, "high": 1.1}, "off_policy_mask": 0.0},
    ),
)


# Each loss, and what takes a whole of a document's ratios.
SEVERAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("grpo", {}),
    ("gspo", {}),
    ("gmpo", CORRECTIONS[-1][1]),
    ("dppo", CORRECTIONS[4][1]),
    *((loss, {}) for loss in LOSSES if loss not in ("grpo", "gspo", "gmpo", "dppo")),
    ("grpo", {"clip_cov": {"share": 0.1, "low": -1.0}}),
)


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    with loaded_once():
        yield


def records_for(model: Path, loss: str, seed: int = 3, **options: Any) -> list[dict[str, Any]]:
    records = make_records(seed, documents=12, **options)
    return set_old_logprobs(records, oracle_logprobs(model, records), seed=seed, **BOUNDS[loss])


def config_for(model: Path, records: Path, loss: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "loss": {"metrics": "full", **loss},
        "data": {"path": str(records), "advantages": "none", **data},
    }


def checked(
    model: Path, records: list[dict[str, Any]], configs: list[dict[str, Any]], output: Path
) -> Iterator[Scored]:
    """Score each configuration under its layout, and compare each score with the oracle."""
    for config, oracle, layout in zip(configs, oracle_steps(model, records, configs), LAYOUTS, strict=True):
        config["model"]["head"] = {"logits_chunk_size": layout[0]}
        config["data"]["tokens_per_microbatch"] = layout[1]
        scored = run_score(config, output)
        check_against_oracle(scored, oracle)
        yield scored


@pytest.mark.parametrize(("kind", "loss"), long_except(PAIRS, *SHORT))
def test_score_equals_the_oracle(kind: str, loss: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model(kind)
    records = records_for(model, loss)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    configs = [
        config_for(model, file, {"type": loss, "entropy_bonus": 0.1, "z_loss": 0.01, **OPTIONS[loss], **denominator})
        for denominator in DENOMINATORS
    ]
    clipped = set()
    for scored in checked(model, records, configs, tmp_path / "out"):
        clipped |= {name for name, value in scored.step.items() if "clipped" in name and 0 < value < 1}
    fractions = {"clipped_ratio_fraction", "clipped_ratio_fraction_low", "clipped_ratio_fraction_high"}
    wanted = fractions if loss in ("grpo", "gspo", "cispo", "gmpo") else set()
    wanted |= set() if loss in ("sapo", "cross_entropy") else {"clipped_fraction"}
    assert clipped == wanted, "both bounds must lie inside the tested range"


@pytest.mark.parametrize(("loss", "correction"), in_tiers(CORRECTIONS, CORRECTIONS[-1:], CORRECTIONS[5:7]))
def test_corrections_equal_the_oracle(
    loss: str, correction: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_tied")
    records = records_for(model, loss)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    options = {"type": loss, "z_loss": 0.01, "gradient_divisor": 3.0, **OPTIONS[loss], **correction}
    configs = [config_for(model, file, options | denominator) for denominator in DENOMINATORS]
    weighed: set[str] = set()
    for scored in checked(model, records, configs, tmp_path / "out"):
        weighed |= {name for name, value in scored.step.items() if "corrected" in name and 0 < value < 1}
        weighed |= {name for name, value in scored.step.items() if "off_policy" in name and 0 < value < 1}
    kinds = {"corrected_fraction_high", "corrected_fraction_low", "off_policy_fraction"}
    bounded = correction["correction"]["type"] != "truncate" or "low" in correction["correction"]
    kinds -= set() if bounded else {"corrected_fraction_low"}
    kinds -= {"off_policy_fraction"} if "off_policy_mask" not in correction else set()
    assert weighed == kinds, "some labels must be weighed away, and others not"


@pytest.mark.parametrize(("loss", "more"), in_tiers(SEVERAL, SEVERAL[:2], SEVERAL[2:4]))
def test_documents_of_several_sequences_equal_the_oracle(
    loss: str, more: dict[str, Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their sequences are in other micro-batches at small budgets, and every number of documents is the same."""
    model = tiny_model("qwen3_tied")
    records = [with_turns(record) for record in in_documents(records_for(model, loss))]
    assert len({record.get("document_id", record["id"]) for record in records}) == 6
    file = write_records(tmp_path / "rollouts.jsonl", records)
    options = {"type": loss, "entropy_bonus": 0.1, "gradient_divisor": "deepspeed", **OPTIONS[loss], **more}
    configs = [config_for(model, file, options | denominator) for denominator in DENOMINATORS]
    for scored in checked(model, records, configs, tmp_path / "out"):
        assert scored.step["num_documents"] == scored.step["documents_seen"] == 6
        assert scored.step["num_sequences"] == len(records) == 12
        assert [line["id"] for line in scored.documents] == [record["id"] for record in records]


@pytest.mark.parametrize(
    "rule", ["group_mean", "leave_one_out", "length_weighted", "group_normalized", "batch_normalized"]
)
def test_a_document_of_several_sequences_counts_once_in_its_group(
    rule: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    records = in_documents(records_for(model, "grpo", advantages="rewards", group_size=6))
    for place, record in enumerate(records):
        record["group_id"] = "one" if place < 6 else "two"
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": "grpo", **OPTIONS["grpo"]}, group_size=3, advantages=rule)
    config["data"]["overlong_penalty"] = {"from": 4, "to": 40, "weight": 0.5}
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("name", ["by_turns", "by_label"])
def test_advantages_of_tokens_by_a_users_function_equal_the_oracle(
    name: str, scale: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of documents of several sequences, whose turns have rewards."""
    model = tiny_model("llama")
    alone = records_for(model, "grpo", advantages="rewards", group_size=6)
    records = in_documents([with_turns(record) | {"group_id": "one"} for record in alone])
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": "grpo", **OPTIONS["grpo"]}, advantages=f"rollouts.own_advantages:{name}")
    config["data"]["advantage_scale"] = scale
    function = _called_with_records(load_custom("data.advantages", config["data"]["advantages"]), ())
    expected = oracle_step(model, records, config | {"data": config["data"] | {"function": function}})
    check_against_oracle(run_score(config, tmp_path / "out"), expected)
    advantages = [value for document in expected.documents for value in document["advantages"] or ()]
    assert len({round(value, 6) for value in advantages}) > 5


# Beside chunks of 7 rows, of 1 and of as many as fit (LAYOUTS); micro-batches of 24 tokens divide every tree.
TREES = (SHORT[1], *(("qwen3_tied", loss) for loss in LOSSES if loss != "gspo"))


@pytest.mark.parametrize(("kind", "loss"), in_tiers(TREES, TREES[:2], TREES[2:]))
def test_trees_of_shared_prefixes_equal_the_oracle(
    kind: str, loss: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model(kind)
    records = grown(make_records(3, documents=12), seed=3)
    set_old_logprobs(records, oracle_logprobs(model, records), seed=3, **BOUNDS[loss])
    beginnings = {tuple(record["input_ids"][:at]) for record in records for at in range(1, 1 + record_length(record))}
    file = write_records(tmp_path / "rollouts.jsonl", records)
    options = {"type": loss, "entropy_bonus": 0.1, "z_loss": 0.01, **OPTIONS[loss]}
    configs = [config_for(model, file, options | denominator, share_prefixes="always") for denominator in DENOMINATORS]
    computed = []
    for scored in checked(model, records, configs, tmp_path / "out"):
        counts = [scored.step[name] for name in ("num_tokens", "computed_tokens", "recomputed_prefix_tokens")]
        assert counts[0] == sum(map(record_length, records)), "counts are logical"
        assert counts[2] == counts[1] - len(beginnings)
        computed.append(counts[1])
    divided, _, whole, _ = computed
    assert whole == len(beginnings) < divided < sum(map(record_length, records))


def grown(records: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Let each record begin as one before it, so that they are trees of several levels; every fourth is a beginning of
    another, or its twin."""
    draw = random.Random(seed)
    for number, record in enumerate(records[1:], start=1):
        ids, before = record["input_ids"], records[draw.randrange(number)]["input_ids"]
        most = min(len(ids), len(before))
        shared = most if number % 4 == 0 else draw.randrange(most // 2, most)
        record["input_ids"] = before[:shared] + ids[shared:]
    return [*records, copy.deepcopy(records[0]) | {"id": "twin"}]


def record_length(record: dict[str, Any]) -> int:
    return len(record["input_ids"])


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_further_architectures_equal_the_oracle(kind: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model(kind)
    records = records_for(model, "grpo")
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": "grpo", **OPTIONS["grpo"]}, tokens_per_microbatch=50)
    config["model"]["head"] = {"logits_chunk_size": 7}
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))


def test_deepspeed_divisor_divides_the_gradient_alone(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Of each loss, on label vectors: tests/losses/test_objective.py."""
    model, loss = tiny_model("qwen3_tied"), "grpo"
    records = records_for(model, loss)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    options = {"type": loss, "gradient_divisor": "deepspeed", "normalize_by": "documents", **OPTIONS[loss]}
    config = config_for(model, file, options)
    scored = run_score(config, tmp_path / "out")
    check_against_oracle(scored, oracle_step(model, records, config))
    plain = run_score(config | {"loss": config["loss"] | {"gradient_divisor": "none"}}, tmp_path / "plain")
    assert scored.step["loss"] == plain.step["loss"]
    assert scored.step["grad_norm"] == pytest.approx(plain.step["grad_norm"] / len(records), rel=1e-5)


@pytest.mark.parametrize("rule", ["group_normalized"])
def test_advantages_from_rewards_equal_the_oracle(rule: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    records = records_for(model, "grpo", advantages="rewards", group_size=4)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    config = config_for(model, file, {"type": "grpo", **OPTIONS["grpo"]}, group_size=4)
    config["data"]["advantages"] = rule
    check_against_oracle(run_score(config, tmp_path / "out"), oracle_step(model, records, config))
