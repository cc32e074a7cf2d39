"""The oracle against numbers worked out by hand and against finite differences."""

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracles.step import (
    Document,
    LabelValues,
    OracleResult,
    clipped_loss,
    complete_loss_config,
    float32,
    loss_terms,
    oracle_logprobs,
    oracle_step,
    read_documents,
    step_metrics,
    sum_terms,
)
from oracles.transformer import Transformer
from tiny import KINDS, VOCABULARY, label_positions, make_model, make_records, set_old_logprobs

RATIO_BOUNDS = {"grpo": (0.8, 1.2), "reinforce": (1.5,), "cispo": (0.7, 1.4)}


def hand_document(old_logprobs: list[float] | None, advantages: list[float] | None, **fields: Any) -> Document:
    count = fields.pop("count", len(old_logprobs or []))
    defaults = {"id": "d", "input_ids": [0] * (count + 1), "temperature": 1.0, "versions": None, "reward": None}
    return Document(
        positions=list(range(1, count + 1)), old_logprobs=old_logprobs, advantages=advantages, **{**defaults, **fields}
    )


def hand_values(logprobs: list[float], entropy: float = 1.0, logsumexp: float = 2.0) -> list[LabelValues]:
    def leaf(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64, requires_grad=True)

    return [LabelValues(leaf(value), leaf(entropy), leaf(logsumexp)) for value in logprobs]


def test_grpo_by_hand() -> None:
    """Two labels, A = 2. New log-probs log 0.3 and log 0.5; old ones log 0.2 and log 0.5.

    rho = 1.5 and 1. Clipped at 1.2: l = -1.2 * 2 = -2.4 and -1 * 2 = -2. Mean -2.2.
    dl/dlogpi = 0 (clipped) and -rho A = -2, so by N = 2: 0 and -1.
    """
    document = hand_document([math.log(0.2), math.log(0.5)], [2.0, 2.0])
    labels = hand_values([math.log(0.3), math.log(0.5)])
    config = complete_loss_config({"type": "grpo"})
    terms = loss_terms([document], [labels], config)
    loss = sum_terms(terms)
    assert loss.item() == pytest.approx(-2.2, abs=1e-6)  # 1e-6: the bound is float32(1.2)
    gradients = torch.autograd.grad(loss, [label.logprob for label in labels], materialize_grads=True)
    assert [gradient.item() for gradient in gradients] == pytest.approx([0.0, -1.0])

    metrics = step_metrics([document], [labels], terms, config, 0)
    expected = {
        "ratio_new_old": 1.25,
        "ratio_new_old_sum": 2.5,
        "ratio_new_old_squared_sum": 3.25,
        "effective_sample_size": 6.25 / 3.25,
        "kl_new_old": (0.5 - math.log(1.5)) / 2,
        "clipped_ratio_fraction": 0.5,
        "clipped_ratio_fraction_low": 0.0,
        "clipped_ratio_fraction_high": 0.5,
        "new_logprobs": (math.log(0.3) + math.log(0.5)) / 2,
        "old_logprobs": (math.log(0.2) + math.log(0.5)) / 2,
        "advantage": 2.0,
        "num_labels": 2,
        "num_tokens": 3,
        "num_documents": 1,
        "num_sequences": 1,
    }
    for name, value in expected.items():
        assert metrics[name][0] == pytest.approx(value), name


# Document a: 1 label of ratio 2; b: 3 labels of ratio 1; c: no label. A = 1 and -1. Labels' l for reinforce are
# -rho A logpi: a: -2 * 1 * -1 = 2; b: -1 * -1 * -2 = -2 each, three times.
@pytest.mark.parametrize(
    ("normalize_by", "loss", "scale"),
    [
        ("labels", (2 - 6) / 4, 8 / 4),
        ("documents", (2 - 6) / 3, 8 / 3),
        ("document_means", (2 - 2) / 3, 4 / 3),
        ("constant", (2 - 6) / 30, 8 / 30),
    ],
)
def test_normalize_by_by_hand(normalize_by: str, loss: float, scale: float) -> None:
    documents = [
        hand_document([-1.0 - math.log(2.0)], [1.0]),
        hand_document([-2.0] * 3, [-1.0] * 3),
        hand_document([], []),
    ]
    values = [hand_values([-1.0]), hand_values([-2.0] * 3), []]
    options = {"type": "reinforce", "normalize_by": normalize_by, "max_labels": 10}
    config = complete_loss_config(options)
    terms = loss_terms(documents, values, config)
    assert sum(term.item() for _, term in terms) == pytest.approx(loss)
    assert sum(abs(term.item()) for _, term in terms) == pytest.approx(scale)

    # Optional terms have the same denominators: H = 1 and logsumexp = 2 on every label.
    config = complete_loss_config({**options, "entropy_bonus": 0.5, "z_loss": 0.25})
    terms = loss_terms(documents, values, config)
    metrics = step_metrics(documents, values, terms, config, 0)
    share = {"labels": 1.0, "documents": 4 / 3, "document_means": 2 / 3, "constant": 4 / 30}[normalize_by]
    assert metrics["policy_loss"][0] == pytest.approx(loss)
    assert metrics["entropy_bonus"][0] == pytest.approx(-0.5 * share)
    assert metrics["z_loss"][0] == pytest.approx(0.25 * 4 * share)
    assert metrics["loss"][0] == pytest.approx(loss + 0.5 * share)
    assert metrics["loss"][1] == pytest.approx(scale + 1.5 * share)
    # The metric means are over the two documents with labels, whatever normalises the loss.
    assert metrics["new_logprobs"][0] == pytest.approx(-1.5)
    assert metrics["ratio_new_old"][0] == pytest.approx(1.5)


def test_gspo_by_hand() -> None:
    """Log-ratios 0.1 and -0.3: R = exp(-0.1), inside its bounds. A = 1 and -3: l = -R and 3 R, the mean R.

    The slope of a label in its own log-prob is -R A, here -R and 3 R; labels and document_means halve it.
    """
    document = hand_document([-1.1, -0.7], [1.0, -3.0])
    labels = hand_values([-1.0, -1.0])
    ratio = math.exp(-0.1)
    for normalize_by, loss in [("document_means", ratio), ("labels", ratio), ("documents", 2 * ratio)]:
        config = complete_loss_config(
            {"type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.2, "normalize_by": normalize_by}
        )
        terms = loss_terms([document], [labels], config)
        total = sum_terms(terms)
        assert total.item() == pytest.approx(loss)
        gradients = torch.autograd.grad(total, [label.logprob for label in labels])
        assert [gradient.item() for gradient in gradients] == pytest.approx([-loss / 2, 3 * loss / 2])
        metrics = step_metrics([document], [labels], terms, config, 0)
        assert metrics["ratio_new_old"][0] == pytest.approx(ratio)
        assert metrics["ratio_new_old_sum"][0] == pytest.approx(ratio)  # of one document
        assert metrics["effective_sample_size"][0] == pytest.approx(1.0)
        assert metrics["kl_new_old"][0] == pytest.approx(ratio + 0.1 - 1.0)
        assert metrics["max_advantage"][0] == 1.0
    assert complete_loss_config({"type": "gspo"})["normalize_by"] == "document_means"


def test_clipped_loss_is_the_formula() -> None:
    """The case analysis against the formula as it is written."""
    generator = random.Random(0)
    for dual_clip in (None, 3.0):
        config = complete_loss_config(
            {"type": "grpo", "epsilon_low": 0.25, "epsilon_high": 0.5, "dual_clip": dual_clip}
        )
        for _ in range(2000):
            ratio, advantage = math.exp(generator.gauss(0.0, 1.0)), generator.gauss(0.0, 1.0)
            clipped = min(max(ratio, 0.75), 1.5)
            expected = -min(ratio * advantage, clipped * advantage)
            if dual_clip is not None and advantage < 0:
                expected = min(expected, -dual_clip * advantage)
            actual = clipped_loss(torch.tensor(ratio, dtype=torch.float64), advantage, config)
            assert actual.item() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (float32(1.2), 1.0, -1.0),  # exactly on a bound: the unclipped gradient
        (float32(0.8), -1.0, 1.0),
        (float32(1.2) + 1e-6, 1.0, 0.0),
        (float32(0.8) - 1e-6, -1.0, 0.0),
        (float32(1.2) + 1e-6, -1.0, 1.0),  # beyond a bound on the side that is never clipped
        (float32(0.8) - 1e-6, 1.0, -1.0),
        (3.0, -1.0, 1.0),
        (3.001, -1.0, 0.0),  # dual_clip
        (1.0, 0.0, 0.0),
    ],
)
def test_gradient_on_and_beside_the_bounds(ratio: float, advantage: float, slope: float) -> None:
    config = complete_loss_config({"type": "grpo", "dual_clip": 3.0})
    leaf = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    loss = clipped_loss(leaf, advantage, config)
    gradient = torch.autograd.grad(loss, leaf)[0].item() if loss.requires_grad else 0.0
    assert gradient == slope


def test_advantages_from_rewards_by_hand() -> None:
    """Rewards 0, 1, 5: mean 2, sample variance (4 + 1 + 9) / 2 = 7."""
    by_hand = {
        "group_mean": 3.0,
        "group_normalized": 3.0 / (math.sqrt(7.0) + 1e-4),
        "batch_normalized": 3.0 / (math.sqrt(7.0) + 1e-4),
        "leave_one_out": 4.5,
        "length_weighted": 5.0 - (1 * 0 + 2 * 1 + 1 * 5) / 4,
    }
    group = [
        {"input_ids": [1] * (labels + 1), "prompt_length": 1, "reward": reward, "group_id": "g"}
        for reward, labels in ((0.0, 1), (1.0, 2), (5.0, 1))
    ]
    for kind, advantage in by_hand.items():
        assert read_documents(group, {"advantages": kind})[-1].advantages == pytest.approx([advantage]), kind
        assert read_documents(group[-1:], {"advantages": kind})[-1].advantages == [0.0], kind

    records = make_records(1, advantages="rewards", group_size=4)
    documents = read_documents(records, {"advantages": "group_mean", "group_size": 4})
    first = [record["reward"] for record in records[:4]]
    assert documents[0].advantages == pytest.approx([first[0] - sum(first) / 4] * len(documents[0].positions))
    assert set(documents[-1].advantages) == {0.0}


def test_absent_inputs_are_absent_metrics() -> None:
    document = hand_document(None, None, count=2)
    labels = hand_values([-1.0, -3.0])
    config = complete_loss_config({"type": "cross_entropy"})
    terms = loss_terms([document], [labels], config)
    metrics = step_metrics([document], [labels], terms, config, 0)
    assert set(metrics) == {
        "loss", "policy_loss", "num_documents", "num_sequences", "num_labels", "num_tokens", "new_logprobs", "entropy",
        "response_length", "max_response_length", "min_response_length",
    }  # fmt: skip
    assert metrics["loss"] == (2.0, 2.0)


def test_staleness_and_reward_by_hand() -> None:
    documents = [
        hand_document([-1.0, -1.0], [1.0, 1.0], versions=[4, 6], reward=1.0),
        hand_document([-1.0], [1.0], versions=[9], reward=None),
        hand_document([], [], versions=[], reward=4.0),  # no label: its reward counts, its version does not
    ]
    values = [hand_values([-1.0, -1.0]), hand_values([-1.0]), []]
    config = complete_loss_config({"type": "grpo"})
    metrics = step_metrics(documents, values, loss_terms(documents, values, config), config, 10)
    assert metrics["staleness"][0] == (5.0 + 1.0) / 2
    assert (metrics["max_staleness"][0], metrics["min_staleness"][0]) == (6.0, 1.0)
    assert (metrics["reward"][0], metrics["max_reward"][0], metrics["min_reward"][0]) == (2.5, 4.0, 1.0)


def test_a_step_without_labels(tmp_path: Path) -> None:
    result = oracle_step(make_model(tmp_path, "llama"), make_records(0)[2:3], {"loss": {"type": "grpo"}})
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert "new_logprobs" not in result.metrics
    assert result.metrics["num_documents"][0] == 1.0


FINITE_DIFFERENCE_LOSSES: list[dict[str, Any]] = [
    {"type": "grpo", "dual_clip": 1.5, "normalize_by": "document_means"},
    {"type": "grpo", "entropy_bonus": 0.3, "z_loss": 0.05},
    {"type": "gspo", "normalize_by": "documents"},
    {"type": "gspo"},
    {"type": "gmpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "normalize_by": "labels"},
    {"type": "sapo", "tau_positive": 2.0, "tau_negative": 3.0},
    {"type": "dppo", "threshold": 0.002},
    {"type": "reinforce", "ratio_cap": 1.5, "normalize_by": "documents"},
    {"type": "cispo", "epsilon_low": 0.3, "epsilon_high": 0.4, "normalize_by": "constant", "max_labels": 9},
    {"type": "cross_entropy", "entropy_bonus": 0.2},
]


def stepped_records(directory: Path, loss: dict[str, Any], seed: int = 5) -> list[dict[str, Any]]:
    records = make_records(seed, documents=8, max_length=12)
    logprobs = oracle_logprobs(directory, records)
    if loss["type"] in ("gspo", "gmpo"):  # with one advantage a document, the slopes are those of the document's sum
        for number, record in enumerate(records):
            record["advantage"] = (1.5, -0.5, 0.8, -2.0)[number % 4]
    if loss["type"] == "gspo":
        return set_old_logprobs(
            records, logprobs, seed=seed, level="document", spread=0.05, bounds=(1.0 - 3e-4, 1.0 + 4e-4)
        )
    # dual_clip at 1.5 is a bound too.
    bounds = (*RATIO_BOUNDS.get(loss["type"], (0.8, 1.2)), 1.5)
    return set_old_logprobs(records, logprobs, seed=seed, bounds=bounds)


def frozen_weight_loss(
    records: list[dict[str, Any]], loss: dict[str, Any], base: OracleResult, new: OracleResult
) -> float:
    """The loss of `new` with the ratios of `base`: what the gradient of reinforce and cispo is the derivative of."""
    count_documents = len(records)
    total = 0.0
    for document, before, after in zip(read_documents(records, {}), base.documents, new.documents, strict=True):
        for ratio, advantage, logprob in zip(before["ratio"], document.advantages, after["logprobs"], strict=True):
            if loss["type"] == "reinforce":
                assert loss["normalize_by"] == "documents"
                total += -min(ratio, 1.5) * advantage * logprob / count_documents
            else:
                assert loss["normalize_by"] == "constant"
                total += -min(max(ratio, 0.7), 1.4) * advantage * logprob / (count_documents * 9)
    return total


@pytest.mark.parametrize("loss", FINITE_DIFFERENCE_LOSSES, ids=lambda loss: "-".join(str(v) for v in loss.values()))
def test_gradient_is_the_slope_of_the_loss(loss: dict[str, Any], tmp_path: Path) -> None:
    """Central differences along one random direction through all parameters, and along one coordinate of a few."""
    directory = make_model(tmp_path / "base", "qwen2", seed=2, num_hidden_layers=1)
    records = stepped_records(directory, loss)
    config = {"loss": loss}
    base = oracle_step(directory, records, config)

    stored = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    directions = [{name: torch.randn(t.shape, generator=generator, dtype=torch.float64) for name, t in stored.items()}]
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.bias", "model.norm.weight"):
        one = {other: torch.zeros_like(tensor) for other, tensor in stored.items()}
        # The coordinate of the largest gradient: rows of tokens that no document has are rightly 0.
        one[name].view(-1)[base.gradients[name].abs().argmax()] = 1.0
        directions.append(one)

    for direction in directions:
        step = 1e-6
        losses = []
        for sign in (1.0, -1.0):
            moved = {name: tensor + sign * step * direction[name] for name, tensor in stored.items()}
            moved_directory = tmp_path / "moved"
            moved_directory.mkdir(exist_ok=True)
            (moved_directory / "config.json").write_bytes((directory / "config.json").read_bytes())
            save_file(moved, moved_directory / "model.safetensors")
            result = oracle_step(moved_directory, records, config)
            if loss["type"] in ("reinforce", "cispo"):
                losses.append(frozen_weight_loss(records, loss, base, result))
            else:
                losses.append(result.loss)
        slope = (losses[0] - losses[1]) / (2 * step)
        expected = sum(float((base.gradients[name] * direction[name]).sum()) for name in stored)
        assert abs(expected) > 1e-5, "a flat loss would test nothing"
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_deepspeed_divides_the_gradient_alone(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "qwen3_tied")
    records = stepped_records(directory, {"type": "grpo"})
    plain = oracle_step(directory, records, {"loss": {"type": "grpo"}})
    divided = oracle_step(directory, records, {"loss": {"type": "grpo", "gradient_divisor": "deepspeed"}})
    assert divided.loss == plain.loss
    assert divided.grad_norm == pytest.approx(plain.grad_norm / len(records))
    assert "lm_head.weight" not in plain.gradients
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(divided.gradients[name], gradient / len(records))


def test_what_is_off_the_mask_does_not_matter(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "mistral")
    records = stepped_records(directory, {"type": "grpo"})
    other = copy.deepcopy(records)
    for record in other:
        positions = label_positions(record)
        for field in ("logprobs", "advantage", "model_version"):
            value = record.get(field)
            if isinstance(value, list) and len(value) == len(record["input_ids"]):
                record[field] = [value[position] for position in positions]
        record.pop("prompt_length", None)
        record["loss_mask"] = [int(position in positions) for position in range(len(record["input_ids"]))]
    assert oracle_step(directory, records, {"loss": {"type": "grpo"}}).metrics == (
        oracle_step(directory, other, {"loss": {"type": "grpo"}}).metrics
    )


@pytest.mark.parametrize("advantages", ["given", "rewards", "none"])
def test_records_are_valid_and_varied(advantages: str) -> None:
    records = make_records(7, advantages=advantages)
    # As Python's json writes it, NaN and Infinity included, and back (NaN is not equal to itself, its text is).
    assert json.dumps(json.loads(json.dumps(records))) == json.dumps(records)
    assert len({record["id"] for record in records}) == len(records)
    counts = [len(label_positions(record)) for record in records]
    assert 0 in counts and 1 in counts and max(counts) > 5
    all_positions = [label_positions(record) for record in records if label_positions(record)]
    assert any(positions[-1] - positions[0] >= len(positions) for positions in all_positions), "several spans"
    assert {len(record["input_ids"]) for record in records} >= {1, 2, 24}
    assert any("prompt_length" in record for record in records) and any("loss_mask" in record for record in records)
    lengths = {(len(r["logprobs"]) == len(r["input_ids"]), n > 0) for r, n in zip(records, counts, strict=True)}
    assert lengths >= {(True, True), (False, True)}
    off_mask = [
        record["logprobs"][position]
        for record in records
        if len(record["logprobs"]) == len(record["input_ids"])
        for position in set(range(len(record["input_ids"]))) - set(label_positions(record))
    ]
    assert None in off_mask and math.inf in off_mask and any(value != value for value in off_mask)
    for record in records:
        assert all(0 <= token < VOCABULARY for token in record["input_ids"])
        assert 0 not in label_positions(record)
    read_documents(records, {"advantages": "group_normalized"})


@pytest.mark.parametrize("max_length", [8, 12, 24, 100])
def test_records_of_every_size(max_length: int) -> None:
    for seed in range(50):
        records = make_records(seed, max_length=max_length, documents=13)
        documents = read_documents(records, {})
        assert max(len(document.input_ids) for document in documents) == max_length
        set_old_logprobs(records, [[-1.0] * len(document.positions) for document in documents], seed=seed)
        read_documents(records, {})  # refuses a log-prob > 0


@pytest.mark.parametrize("kind", KINDS)
def test_ratios_land_on_both_sides_of_both_bounds(kind: str, tmp_path: Path) -> None:
    directory = make_model(tmp_path, kind)
    for loss in ({"type": "grpo"}, {"type": "gspo"}):
        result = oracle_step(directory, stepped_records(directory, loss), {"loss": loss})
        low = result.metrics["clipped_ratio_fraction_low"][0]
        high = result.metrics["clipped_ratio_fraction_high"][0]
        assert low > 0.05 and high > 0.05 and low + high < 0.95, (low, high)
        # A single flipped sign somewhere must not be able to hide in a small gradient.
        assert all(float(gradient.norm()) > 1e-4 * result.grad_norm for gradient in result.gradients.values())
        assert set(result.gradients) == set(Transformer(directory).parameters)
