"""What a run says before its first step, after it, and when it ends otherwise than asked."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import Console

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
from truestep.demo import model as demo_model
from truestep.metrics.sinks import ConsoleSink
from truestep.train import make_trainer

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


@pytest.mark.parametrize(("ratio", "warned"), [(1.0, False), (1.0005, False), (0.99, True), (float("nan"), True)])
def test_a_ratio_off_at_step_one_is_a_warning(ratio: float, warned: bool) -> None:
    written = io.StringIO()
    sink = ConsoleSink(Console(file=written), steps=3)
    sink.step({"step": 1, "ratio_new_old": ratio})
    sink.step({"step": 2, "ratio_new_old": 0.5})
    assert written.getvalue().count("warning:") == warned


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_the_live_line_fits_the_terminal_and_keeps_the_step(width: int) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, color_system=None)
    sink = ConsoleSink(console, steps=3000, title="training")
    numbers = {"reward": 0.5, "loss": -0.1, "new_logprobs": -3.2, "ratio_new_old": 1.0, "grad_norm": 0.1}
    sink.step({"step": 1234, **numbers, "clipped_ratio_fraction": 0.1, "tokens_per_second": 12345.0})
    sink._progress.refresh()
    sink.close()
    line = [text for text in written.getvalue().replace("\r", "\n").splitlines() if "1234/3000" in text][-1]
    assert "reward 0.500" in line
    assert "…" not in line


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
