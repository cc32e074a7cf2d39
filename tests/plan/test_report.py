"""The command `plan`, the lines of a run beside it, and the message of a run whose GPU is full."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from click.testing import CliRunner
from rich.console import Console

from small_runs import file_config, write_rollouts
from tiny import make_model
from truestep.cli import main
from truestep.plan.beside import PlannedBeside
from truestep.plan.exhausted import MemoryExhaustedError
from truestep.plan.memory import GIB
from truestep.step.runner import StepRunner
from truestep.train import train
from truestep.trainer import Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-8B's shape without a weight."""
    folder = tmp_path_factory.mktemp("plan")
    transformers.Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128,
    ).save_pretrained(folder / "model")  # fmt: skip
    sections = {
        "model": {"path": str(folder / "model")},
        "loss": {"type": "grpo"},
        "data": {"group_size": 8, "tokens_per_microbatch": 16384},
        "sampler": {"prompts": "prompts.jsonl", "reward": "rewards:score"},
        "schedule": {"docs_per_step": 256, "steps": 3},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder / "run.yaml"


def test_a_plan_that_does_not_fit(config: Path, tmp_path: Path) -> None:
    asked = ["plan", str(config), "--memory", "80", "--ranks", "4", "--output", str(tmp_path / "out")]
    outcome = CliRunner().invoke(main, asked)
    assert outcome.exit_code == 1, outcome.output
    assert "8.19 billion weights, bfloat16, data_shard 4" in outcome.output
    assert "It does not fit 80 GiB" in outcome.output
    assert "--model.activation_checkpointing true" in outcome.output
    assert "Layouts of 4 ranks that fit" not in outcome.output, "tensor ranks would fit, and cannot sample in process"
    assert all(len(line) <= 110 for line in outcome.output.splitlines())
    values = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert values["weights"] == 8_190_735_360
    assert values["stages"][0]["total"] == pytest.approx(sum(values["stages"][0]["bytes"].values()))


def test_a_plan_that_fits(config: Path) -> None:
    asked = ["plan", str(config), "--memory", "80", "--ranks", "8", "--model.activation_checkpointing", "true"]
    outcome = CliRunner().invoke(main, asked)
    assert outcome.exit_code == 0, outcome.output
    assert "It fits 80 GiB" in outcome.output


def test_a_layout_that_the_ranks_do_not_make_up(config: Path) -> None:
    outcome = CliRunner().invoke(main, ["plan", str(config), "--ranks", "3", "--parallel.context", "2"])
    assert outcome.exit_code == 1 and "does not divide the 3 ranks" in outcome.output


def test_a_run_says_what_was_planned_and_what_it_took() -> None:
    said: list[str] = []
    beside = PlannedBeside(62 * GIB, said.append, lambda: 63.25 * GIB)
    for step in range(1, 6):
        beside.step({"step": step})
    assert said == [
        "memory after 3 steps: 63.2 GiB at the peak on rank 0, 62.0 GiB planned",
    ]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("computing", "the activations and the head's logits"),
        ("loading", "the model's weights and what is made of them"),
        ("evaluating", "the sampler's cache"),
    ],
)
def test_memory_that_runs_out_is_explained(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less.")

    target: tuple[Any, str] = {
        "computing": (StepRunner, "accumulate"),
        "loading": (import_module("truestep.train"), "make_policy"),  # the package has a function of this name
        "evaluating": (Trainer, "_evaluate"),
    }[place]
    monkeypatch.setattr(*target, full)
    if place == "evaluating":
        from truestep.ranks.watch import Watch

        monkeypatch.setattr(Watch, "doing", "evaluating after step 0")
    model = make_model(tmp_path / "model", "qwen3")
    write_rollouts(tmp_path / "rollouts.jsonl", 4)
    with pytest.raises(MemoryExhaustedError) as caught:
        train(file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run"), Console(quiet=True))
    message = str(caught.value)
    assert "the GPU's memory ran out while" in message and said in message
    assert "would need" in message and "truestep plan" in message
