"""Runs `score` on records and holds everything it writes against the float64 oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from oracles.step import OracleResult
from truestep.config.schema import Config
from truestep.model.policy import Policy
from truestep.ranks.group import Ranks
from truestep.tools.score import score

TOLERANCE = 1e-5
# Percentiles of a histogram are no sums of terms; they are tested against numpy where they are made.
NOT_IN_ORACLE = ("log_ratio_p1", "log_ratio_p5", "log_ratio_p50", "log_ratio_p95", "log_ratio_p99")
BESIDE_METRICS = ("num_micro_batches", "computed_tokens", "recomputed_prefix_tokens", "documents_seen", "num_rejected")


@dataclass(frozen=True)
class Scored:
    step: dict[str, Any]
    documents: list[dict[str, Any]]
    gradients: dict[str, torch.Tensor]


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def run_score(config: dict[str, Any], output: Path) -> Scored:
    """Through the files, as another system would read them."""
    score(Config.model_validate(config), output, gradients=True)
    lines = (output / "scores.jsonl").read_text(encoding="utf-8").splitlines()
    return Scored(
        json.loads((output / "step.json").read_text(encoding="utf-8")),
        [json.loads(line) for line in lines],
        load_file(output / "gradients.safetensors"),
    )


@contextmanager
def loaded_once() -> Iterator[None]:
    """Scores of the same model over the same ranks go on with the policy that the first of them loaded, as a run's
    steps do."""
    load, loaded = import_module("truestep.tools.score").make_policy, {}

    def make_policy(config: Config, ranks: Ranks) -> Policy:
        adapter = config.adapter and config.adapter.model_dump_json()
        known = config.model.model_dump_json(), adapter, config.parallel.model_dump_json()
        if known not in loaded:
            loaded[known] = load(config, ranks)
        return loaded[known]

    with patch("truestep.tools.score.make_policy", make_policy):
        yield


def differences(scored: Scored, oracle: OracleResult) -> Iterator[tuple[str, float]]:
    """Every quantity's difference, relative as docs/contract.md, section 2, says."""
    logged = {name for name in scored.step if name not in (*NOT_IN_ORACLE, *BESIDE_METRICS)}
    expected = set(oracle.metrics) - ({"policy_loss"} if "policy_loss" not in logged else set())
    if not scored.step["num_labels"]:
        # A sum of nothing is 0: truestep logs it, the oracle leaves it out.
        empty = {name for name in ("policy_loss", "entropy_bonus", "z_loss") if scored.step.get(name) == 0}
        logged -= empty - expected
    assert logged == expected, f"metrics that only one of the two has: {logged ^ expected}"
    for name in logged:
        value, scale = oracle.metrics[name]
        yield name, abs(scored.step[name] - value) / max(scale, 1e-30) if scored.step[name] != value else 0.0
    assert set(scored.gradients) == set(oracle.gradients)
    for name, expected_gradient in oracle.gradients.items():
        difference = (scored.gradients[name].double() - expected_gradient).norm()
        floor = max(float(expected_gradient.norm()), 1e-6 * oracle.grad_norm, 1e-30)
        yield f"gradient of {name}", float(difference) / floor
    for mine, theirs in zip(scored.documents, oracle.documents, strict=True):
        assert mine["id"] == theirs["id"]
        for name in ("logprobs", "entropy", "ratio"):
            pairs = zip(mine[name], theirs[name], strict=True)
            # A log-prob is absolute, and a ratio is the exponential of one.
            errors = (abs(a - b) / (abs(b) if name == "ratio" else 1) for a, b in pairs)
            yield f"{name} of document {mine['id']}", max(errors, default=0.0)


def check_against_oracle(scored: Scored, oracle: OracleResult) -> None:
    wrong = {name: value for name, value in differences(scored, oracle) if not value <= TOLERANCE}
    assert not wrong, f"out of bounds: {wrong}"
