"""examples: every configuration trains as it is written, with a tiny model in place of the one that it names."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from pages import ROOT
from selection import nightly_except
from small_runs import quiet_trainer, read_lines, sort_prompts, word_model, write_lines
from tiny import make_model
from truestep.config.load import load_config

EXAMPLES = sorted(file.stem for file in (ROOT / "examples").glob("*.yaml"))
ELSEWHERE = {"sft": "tests/test_sft.py"}  # it needs a chat template
SAMPLED = ("lora-8b", "lora-32b", "full-1.7b", "full-8b")
HELD_BACK = ("dppo",)  # a random model is far from the records' sampler, so its masks weigh every label 0
QUICK = ("gspo", "lora-8b")


@pytest.mark.parametrize("name", nightly_except([name for name in EXAMPLES if name not in ELSEWHERE], *QUICK))
def test_an_example_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    over = {
        "model.dtype": "float32",
        "model.activation_checkpointing": "false",
        "model.compile": "false",
        "checkpoint.directory": str(tmp_path / "run"),
        "optimizer.learning_rate": "0.001",
        "logging.console": "false",
    }
    if name in SAMPLED:
        prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(8))
        over |= {
            "model.path": str(word_model(tmp_path / "model")),
            "sampler.prompts": str(prompts),
            "sampler.reward": "plain_rewards:digit_reward",
            "sampler.max_new_tokens": "6",
            "schedule.steps": "3",
        }
    else:  # its rollouts have the tokens of Qwen3
        make_model(tmp_path / "model", "qwen3_tied", vocab_size=151936, hidden_size=16, intermediate_size=16)
        over["model.path"] = str(tmp_path / "model")
    config = load_config(ROOT / "examples" / f"{name}.yaml", [f"--{option}={value}" for option, value in over.items()])
    quiet_trainer(config).run()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 3 * config.schedule.updates_per_batch + 1))
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines) or name in HELD_BACK


@pytest.mark.long
def test_the_mixture_replays_what_its_engine_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["echo"])
    importlib.import_module("examples.experts.echo").main()
    over = ["--loss.metrics=full", "--logging.console=false"]
    config = load_config(ROOT / "examples" / "experts" / "train.yaml", over)
    trainer = quiet_trainer(config)
    trainer.run()
    lines = read_lines(trainer.directory.path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 61))
    for line in lines:
        assert line["replayed_tokens"] == pytest.approx(1 - line["num_sequences"] / line["num_tokens"])
        if line["step"] % 2:
            assert line["route_disagreement"] == 0 and line["kl_new_old"] < 1e-6, "the weights that sampled them"
    assert all(line["route_disagreement"] > 0 for line in lines[1:6:2])
    layers = {name for name in lines[0] if name.startswith("route_disagreement/")}
    assert layers == {"route_disagreement/1", "route_disagreement/2"}
    assert lines[0]["reward"] < 0.2 and lines[-2]["reward"] > 0.85


def test_every_example_has_a_row() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [name for name in EXAMPLES if f"[{name}.yaml]({name}.yaml)" not in page] == []
    folders = {file.name for file in (ROOT / "examples").iterdir() if file.is_dir() and file.name != "__pycache__"}
    assert [name for name in folders if f"({name})" not in page and f"({name}/" not in page] == []
