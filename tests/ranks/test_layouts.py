"""One step over ranks is the step of one process, against the float64 oracle: what `verify` does not ask of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from oracles.step import oracle_logprobs, oracle_step
from ranks.cases import on_ranks, score_all, score_compiled
from scoring import Scored, check_against_oracle, write_records
from tiny import make_records, set_old_logprobs
from truestep.tools.verify.oracle.step import OracleResult

Model = Callable[[str], Path]

# parallel section, breadth-first micro-batches, tokens of a micro-batch
Layout = tuple[dict[str, Any], int, int]


def read(output: Path) -> Scored:
    lines = (output / "scores.jsonl").read_text(encoding="utf-8").splitlines()
    step = json.loads((output / "step.json").read_text(encoding="utf-8"))
    return Scored(step, [json.loads(line) for line in lines], load_file(output / "gradients.safetensors"))


def options(model: Path, rollouts: Path, loss: dict[str, Any], layout: Layout) -> dict:
    parallel, breadth, budget = layout
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "loss": loss,
        "data": {"path": str(rollouts), "advantages": "none", "tokens_per_microbatch": budget},
        "parallel": parallel,
        "schedule": {"breadth_first_micro_batches": breadth},
    }


def make_case(kind: str, loss: dict[str, Any], tiny_model: Model, directory: Path) -> tuple[Path, Path, list[dict]]:
    """Ratios on both sides of both bounds, whatever the loss."""
    model = tiny_model(kind)
    records = make_records(11, documents=13)
    level = "document" if loss["type"] == "gspo" else "label"
    bounds = (1 - loss.get("epsilon_low", 0.2), 1 + loss.get("epsilon_high", 0.2))
    set_old_logprobs(records, oracle_logprobs(model, records), level=level, bounds=bounds)
    return model, write_records(directory / f"{kind}-{loss['type']}.jsonl", records), records


def loss_of(kind: str) -> dict[str, Any]:
    loss: dict[str, Any] = {"type": kind, "metrics": "full", "entropy_bonus": 0.01}
    if kind in ("grpo", "gspo", "cispo"):
        loss |= {"epsilon_low": 0.2, "epsilon_high": 0.2}
    return loss


def gradient_error(output: Path, oracle: OracleResult) -> float:
    """Of all gradients together, relative."""
    gradients = read(output).gradients
    squares = sum(float((gradients[n].double() - g).square().sum()) for n, g in oracle.gradients.items())
    return squares**0.5 / oracle.grad_norm


def test_more_ranks_than_documents(tiny_model: Model, tmp_path: Path) -> None:
    """Three of the four run passes of no weight, and one document has no label at all."""
    model = tiny_model("llama")
    records = make_records(5, documents=3)[1:]
    set_old_logprobs(records, oracle_logprobs(model, records))
    rollouts = write_records(tmp_path / "few.jsonl", records)
    config = options(model, rollouts, {"type": "grpo", "metrics": "full"}, ({}, 1, 64))
    alone = write_records(
        tmp_path / "unlabelled.jsonl", [records[1] | {"loss_mask": [0] * len(records[1]["input_ids"])}]
    )
    nothing = options(model, alone, {"type": "cross_entropy"}, ({}, 1, 64))
    on_ranks(4, score_all, [(config, str(tmp_path / "few")), (nothing, str(tmp_path / "none"))])
    check_against_oracle(read(tmp_path / "few"), oracle_step(model, records, config))
    none = read(tmp_path / "none")
    assert none.step["loss"] == 0 and none.step["num_labels"] == 0
    assert all(not gradient.any() for gradient in none.gradients.values())


def test_recomputed_activations_and_half_precision(tiny_model: Model, tmp_path: Path) -> None:
    """In bfloat16 a layout's error against float64 is at most 1.5 times the one process's."""
    loss = {"type": "grpo", "metrics": "full"}
    model, rollouts, records = make_case("qwen3_tied", loss, tiny_model, tmp_path)
    plain = options(model, rollouts, loss, ({}, 1, 64))
    recomputed = plain | {"model": {**plain["model"], "activation_checkpointing": True}}
    half = plain | {"model": {**plain["model"], "dtype": "bfloat16", "head": {"fp32_lm_head": True}}}
    on_ranks(2, score_all, [(recomputed, str(tmp_path / "recomputed")), (half, str(tmp_path / "half"))])
    on_ranks(1, score_all, [(half, str(tmp_path / "one"))])
    oracle = oracle_step(model, records, plain)
    check_against_oracle(read(tmp_path / "recomputed"), oracle)
    assert 1e-4 < gradient_error(tmp_path / "half", oracle) <= 1.5 * gradient_error(tmp_path / "one", oracle)


@pytest.mark.nightly
def test_compiled_layers(tiny_model: Model, tmp_path: Path) -> None:
    """Sharded and recomputed, and in stages. Ranks of a context meet in attention, outside what is compiled."""
    loss = {"type": "grpo", "metrics": "full"}
    model, rollouts, records = make_case("llama", loss, tiny_model, tmp_path)
    plain = options(model, rollouts, loss, ({}, 1, 64))
    compiled = plain | {"model": {**plain["model"], "compile": True}}
    runs = {
        "sharded": compiled | {"model": {**compiled["model"], "activation_checkpointing": True}},
        "pipeline": compiled | {"parallel": {"pipeline": 2}},
    }
    on_ranks(2, score_compiled, [(config, str(tmp_path / name)) for name, config in runs.items()])
    oracle = oracle_step(model, records, plain)
    for name in runs:
        check_against_oracle(read(tmp_path / name), oracle)
