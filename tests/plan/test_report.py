"""The command `plan`, the lines of a run beside it, and the message of a run whose GPU is full."""

from __future__ import annotations

import dataclasses
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

from plan.shapes import H100
from small_runs import file_config, write_rollouts
from tiny import make_model
from truestep.commands.cli import main
from truestep.config.load import load_config
from truestep.plan.advice import layout_of
from truestep.plan.exhausted import MemoryExhaustedError, explain_exhausted
from truestep.plan.memory import GIB, GRADIENTS, MASTERS, STATES, WEIGHTS, plan_memory
from truestep.plan.shape import read_shape
from truestep.run.train import train
from truestep.run.trainer import Trainer
from truestep.step.compute.runner import StepRunner


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
    assert "--model.activation_checkpointing full" in outcome.output
    assert "Together these fit, with the same numbers (" in outcome.output
    assert "  model: {activation_checkpointing: elementwise}" in outcome.output
    assert "pipeline:" not in outcome.output, "pipelines would fit, and cannot sample in process"
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


def test_a_plan_with_rates_has_the_time_and_what_fits(config: Path, tmp_path: Path) -> None:
    (card := tmp_path / "card.json").write_text(json.dumps(dataclasses.asdict(H100)))
    asked = ["plan", str(config), "--card", str(card), "--gpus", "8", "--length", "1200", "--output", str(tmp_path)]
    outcome = CliRunner().invoke(main, asked)
    assert outcome.exit_code == 1, outcome.output
    assert "documents of 1,200 (--length)" in outcome.output and "On H100: " in outcome.output
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["step"]["total"] == pytest.approx(sum(values["step"]["seconds"].values()))
    assert values["step"]["tokens"] == 256 * 1200 and values["card"] == "H100"
    # What is proposed fits, as the plan of it says.
    lines = outcome.output.split("Together these fit, with the same numbers")[1].split(":\n", 1)[1].split("\n\n")[0]
    proposed = yaml.safe_load("\n".join(line.strip() for line in lines.splitlines()))
    given = yaml.safe_load(config.read_text())
    better = tmp_path / "better.yaml"
    better.write_text(yaml.safe_dump({**given, **{name: given.get(name, {}) | proposed[name] for name in proposed}}))
    outcome = CliRunner().invoke(main, ["plan", str(better), "--card", str(card), "--gpus", "8", "--length", "1200"])
    assert outcome.exit_code == 0 and "It fits 79 GiB" in outcome.output, outcome.output


def test_a_plan_of_groups_that_share_their_prompt(config: Path, tmp_path: Path) -> None:
    (card := tmp_path / "card.json").write_text(json.dumps(dataclasses.asdict(H100)))
    asked = ["plan", str(config), "--card", str(card), "--ranks", "8", "--model.activation_checkpointing", "full"]

    def planned(*more: str) -> tuple[str, float]:
        outcome = CliRunner().invoke(main, [*asked, *more, "--output", str(tmp_path)])
        assert outcome.exit_code == 0, outcome.output
        return outcome.output, json.loads((tmp_path / "plan.json").read_text())["step"]["total"]

    together, seconds = planned("--prompt", "2048", "--length", "2560")
    said = "Computed once: a prompt of 2,048 that 8 documents share (--prompt): 196,608 tokens, 30% of the step's."
    assert said in together
    apart, longer = planned("--prompt", "2048", "--length", "2560", "--data.share_prefixes", "off")
    assert "Computed with each document: a prompt of 2,048" in apart and longer > 2 * seconds
    assert "that 4 documents share" in planned("--prompt", "2048", "--length", "2560", "--group", "4")[0]
    for wrong, problem in (
        (["--group", "4"], "--prompt says how long it is"),
        (["--prompt", "2560", "--length", "2560"], "has none left for an answer"),
    ):
        outcome = CliRunner().invoke(main, [*asked, *wrong])
        assert outcome.exit_code == 1 and problem in outcome.output


def test_a_card_that_is_named_has_its_memory_and_no_time(config: Path, tmp_path: Path) -> None:
    outcome = CliRunner().invoke(main, ["plan", str(config), "--card", "h100", "--gpus", "8"])
    assert outcome.exit_code == 1 and "It does not fit 79 GiB" in outcome.output, outcome.output
    assert "The time is not planned: the rates of the card among 8 ranks were not measured." in outcome.output
    (card := tmp_path / "card.json").write_text(json.dumps(dataclasses.asdict(H100) | {"link": 0.0}))
    outcome = CliRunner().invoke(main, ["plan", str(config), "--card", str(card), "--gpus", "8", "--memory", "1000"])
    assert outcome.exit_code == 0 and "not planned" in outcome.output, "their link was not measured"
    outcome = CliRunner().invoke(main, ["plan", str(config), "--card", str(card), "--memory", "1000"])
    assert outcome.exit_code == 0 and "On H100: " in outcome.output, outcome.output


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", json.dumps(dataclasses.asdict(H100) | {"copy": 0.0})])
def test_what_is_no_card_is_refused(content: str, config: Path, tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text(content)
    outcome = CliRunner().invoke(main, ["plan", str(config), "--card", str(tmp_path / "card.json")])
    assert outcome.exit_code == 1 and "it is no file of kept rates" in outcome.output
    outcome = CliRunner().invoke(main, ["plan", str(config), "--card", "H3000"])
    assert outcome.exit_code == 1 and "one of H200, H100" in outcome.output


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
        "loading": (import_module("truestep.run.train"), "make_policy"),  # the package has a function of this name
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


def test_states_that_have_no_room_are_named_and_not_activations(config: Path) -> None:
    """The first update makes them: what was held before is less than what training keeps."""
    given = load_config(config, [])
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has less.")
    (planned,) = plan_memory(given, read_shape(given), layout_of(given, 1))
    lasting = sum(planned.kinds[kind] for kind in (MASTERS, WEIGHTS, GRADIENTS, STATES))
    message = explain_exhausted(given, 1, "computing step 1", 0.7 * lasting, error)
    assert (
        f"what training keeps (weights, gradients, the optimizer's state), planned with {lasting / GIB:.2f}" in message
    )
    assert "--optimizer.offload all would need" in message
    message = explain_exhausted(given, 1, "computing step 1", lasting + 3 * GIB, error)
    assert "the activations and the head's logits: 3.00 GiB of them" in message


def test_the_state_in_memory_is_counted(config: Path) -> None:
    """Master weights and two moments in float32, over four ranks, twice."""
    held = 2 * 3 * 4 * 8.19e9 / 4 / GIB
    asked = ["plan", str(config), "--ranks", "4", "--checkpoint.in_memory_every", "5"]
    assert f"Keepers hold {held:.1f} GiB of host memory for each rank" in CliRunner().invoke(main, asked).output
    assert "Keepers" not in CliRunner().invoke(main, asked[:-2]).output
