"""What a run says before its first step, after it, and when it ends otherwise than asked."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from small_runs import (
    file_config,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    type_command,
    word_model,
    write_lines,
    write_rollouts,
)
from truestep.config.load import dump_config
from truestep.config.schema import Config
from truestep.run.notes import longer_by, what_next
from truestep.run.train import make_trainer
from truestep.tools.demo import model as demo_model

Model = Callable[[str], Path]


@pytest.fixture
def config(tiny_model: Model, tmp_path: Path) -> Config:
    write_rollouts(tmp_path / "r.jsonl", 20)
    return file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", checkpoint={"every": 2})


def test_rejected_records_are_counted_before_the_first_step(config: Config, tmp_path: Path) -> None:
    lines = [json.dumps({"id": "bad", "input_ids": []}), "{", (tmp_path / "r.jsonl").read_text()]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    text = said(config)
    assert "2 of 22 records are rejected: 1 × " in text
    assert f"see {tmp_path / 'run' / 'rejected.jsonl'}" in text


def test_a_run_that_starts_over_says_that_it_removes_steps(config: Config, tmp_path: Path) -> None:
    said(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "run has no checkpoint: starting again, its 4 steps are removed" in said(config)


@pytest.mark.parametrize("broken", ["part-00000.safetensors", "tensors.json", "state.json", "checksums.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(broken: str, config: Config, tmp_path: Path) -> None:
    said(config)
    before = [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")]
    (tmp_path / "run/checkpoints/step-00000004/truestep" / broken).write_bytes(b"torn")
    text = said(config)
    assert re.search(
        "warning: the checkpoint .*step-00000004 is damaged: truestep/.* goes on from .*step-00000002", text
    )
    assert "going on after step 2" in text
    assert [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")] == before
    assert (tmp_path / "run/checkpoints/damaged-step-00000004").is_dir()


def test_a_model_that_never_ends_a_text_is_warned_of(tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = model / name
        options = json.loads(file.read_text())
        file.write_text(json.dumps({key: value for key, value in options.items() if "eos_token" not in key}))
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    text = said(sampled_config(model, prompts, tmp_path / "run", schedule={"steps": 1}))
    assert "warning: neither the model's configuration nor its tokenizer names an end-of-text token" in text
    assert demo_model.END not in text


def test_a_run_says_what_runs_on_what(config: Config, tmp_path: Path) -> None:
    lines = said(config).splitlines()
    weights = sum(tensor.numel() for tensor in load_file(Path(config.model.path) / "model.safetensors").values())
    assert lines[0] == f"run: grpo, steps of 5 documents until the data ends, in {tmp_path / 'run'}"
    assert lines[1] == f"model: {config.model.path} (LlamaForCausalLM), {weights:,} parameters, computes in float32"
    threads = torch.get_num_threads()
    assert lines[2] == f"device: cpu, {threads} thread{'s' if threads > 1 else ''}"
    assert lines[3] == f"documents: 20 of {tmp_path / 'r.jsonl'}"
    planned = r"memory planned: \d+\.\d GiB at the peak of a step, with micro-batches of [\d,]+ tokens"
    assert re.fullmatch(planned, lines[4])
    assert lines[-1] == f"the data ended after step 4; the run is in {tmp_path / 'run'}"


def test_a_run_that_samples_says_its_prompts_and_its_trained_weights(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    config = sampled_config(word_model(tmp_path / "model"), prompts, tmp_path / "run", schedule={"steps": 1})
    frozen = config.model.model_copy(update={"freeze": ["model.embed_tokens.*"]})
    text = said(config.model_copy(update={"model": frozen}))
    assert f"documents: 4 prompts of {prompts}, {config.data.group_size} completions of each, sampled here\n" in text
    weights = load_file(tmp_path / "model" / "model.safetensors")
    total = sum(tensor.numel() for tensor in weights.values())
    trained = total - weights["model.embed_tokens.weight"].numel()
    assert f"{total:,} parameters, {trained:,} of them trained, computes in" in text


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("given", [["--schedule.steps", "4"], ["--schedule.steps=4"]])
def test_the_commands_that_come_next_can_be_typed(finished: bool, given: list[str]) -> None:
    typed = ["truestep", "train", "a b.yaml", *given, "--seed", "1"]
    head, *lines = what_next(Path("runs/a b"), finished, "schedule.steps", typed)
    assert head == "next:"
    commands = [shlex.split(line.partition(": ")[2]) for line in lines]
    again = ["truestep", "train", "a b.yaml", "--seed", "1", "--schedule.steps", "NUMBER"] if finished else typed
    assert commands[0] == ["truestep", "report", "runs/a b"]
    assert commands[1] == ["truestep", "export", "runs/a b", "--output", "DIRECTORY"]
    assert commands[2] == again
    narrow = what_next(Path("runs/a b"), finished, "schedule.steps", typed, width=60)
    assert [shlex.split(line) for line in narrow[2::2]] == commands, "each command has a line of its own"


def test_a_run_without_a_step_has_no_page_and_no_model() -> None:
    typed = ["truestep", "train", "a.yaml"]
    assert what_next(Path("run"), False, None, typed, made=False) == [
        "next:",
        "  go on from here: truestep train a.yaml",
    ]
    assert what_next(Path("run"), True, None, typed, made=False) == []


def test_a_run_whose_data_ended_is_made_longer_by_epochs(config: Config, tmp_path: Path) -> None:
    assert config.data.path is not None
    assert longer_by(config, 4) == "data.epochs"
    six = config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": 6})})
    assert longer_by(six, 4) == "data.epochs"  # the data ended before the steps were made
    assert longer_by(six, 6) == "schedule.steps"
    sent = config.model_copy(update={"data": config.data.model_copy(update={"path": None})})
    assert longer_by(sent, 4) is None
    assert len(what_next(tmp_path, True, None, ["truestep", "train", "a.yaml"])) == 3
    said(config)
    more = config.model_copy(update={"data": config.data.model_copy(update={"epochs": 2})})
    text = said(more)
    assert "data.epochs is now 2; before it was 1" in text
    assert "the data ended after step 8" in text


def test_a_model_that_changed_is_told_how_to_begin_with_it(config: Config) -> None:
    said(config)
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": "models/other"})})
    assert "To begin with the new model, name another checkpoint.directory" in said(other)
    limited = config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": 9})})
    assert "schedule.steps is now 9; before it was null" in said(limited)


def other_options(config: Config, model: Path) -> Config:
    return config.changed({"model.path": str(model), "loss.type": "reinforce", "optimizer.learning_rate": 0.5})


def test_a_start_that_makes_no_step_changes_no_options(config: Config, tiny_model: Model, tmp_path: Path) -> None:
    """Nor does the header name a model that does not run."""
    said(config)
    before = (tmp_path / "run/config.yaml").read_bytes()
    text = said(other_options(config, tiny_model("qwen3")))
    assert "optimizer.learning_rate is now 0.5; before it was 0.01" in text
    newest = tmp_path / "run/checkpoints/step-00000004"
    assert f"\nmodel: {newest} (LlamaForCausalLM), " in text
    assert (tmp_path / "run/config.yaml").read_bytes() == before
    assert "before it was" not in said(config)


def test_options_are_noted_with_the_first_step_they_make(config: Config, tiny_model: Model, tmp_path: Path) -> None:
    two = config.changed({"schedule.steps": 2})
    said(two)
    other = other_options(config, tiny_model("qwen3")).changed({"schedule.steps": 3})
    trainer = make_trainer(other, Console(file=io.StringIO()))
    began = (tmp_path / "run/config.yaml").read_bytes()
    assert yaml.safe_load(began)["optimizer"]["learning_rate"] == 0.01
    trainer.run()
    made = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (made["optimizer"]["learning_rate"], made["loss"]["type"]) == (0.5, "reinforce")
    assert made["model"]["path"] == config.model.path, "the weights came from the checkpoint"
    text = said(config)
    assert "optimizer.learning_rate is now 0.01; before it was 0.5" in text
    assert "model.path is now" not in text
    kept = tmp_path / "run/config-until-00000002.yaml"
    assert kept.read_bytes() == began
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000003")
    said(config.changed({"schedule.steps": 2}))
    assert not list((tmp_path / "run").glob("config-until-*")), "the steps that others made are gone"
    assert (tmp_path / "run/config.yaml").read_bytes() == began


def test_options_of_steps_that_are_rolled_back_go_with_them(config: Config, tmp_path: Path) -> None:
    said(config.changed({"schedule.steps": 2}))
    kept = (tmp_path / "run/config.yaml").read_bytes()
    fast = config.changed({"optimizer.learning_rate": 0.5, "checkpoint.every": 0, "schedule.steps": 2})
    trainer = make_trainer(fast.changed({"schedule.steps": 4}), Console(file=io.StringIO()))
    honest = trainer.directory.record_step

    def die(step: int, *arguments: object) -> None:
        honest(step, *arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    trainer.directory.record_step = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["optimizer"]["learning_rate"] == 0.5
    text = said(config.changed({"schedule.steps": 2}))
    assert "before it was" not in text
    assert (tmp_path / "run/config.yaml").read_bytes() == kept


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_with_its_exit_code_and_a_checkpoint(
    kind: signal.Signals, config: Config, tmp_path: Path
) -> None:
    endless = config.model_copy(update={"data": config.data.model_copy(update={"epochs": 10_000})})
    (tmp_path / "run.yaml").write_text(dump_config(endless))
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["epochs"] == 10_000
    process = type_command(["train", str(tmp_path / "run.yaml")], tmp_path / "console")
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "metrics.jsonl").is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid or 0, kind)
        process.join(200)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 128 + kind, (tmp_path / "console").read_text(encoding="utf-8")
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")]
    assert (tmp_path / "run/checkpoints" / f"step-{steps[-1]:08d}").is_dir()


def test_two_processes_do_not_write_one_run(config: Config) -> None:
    said(config)
    first = make_trainer(config, Console(file=io.StringIO()))
    with pytest.raises(Exception, match="is being written by another process"):
        make_trainer(config, Console(file=io.StringIO()))
    first.run()
