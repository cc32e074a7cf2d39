"""Where numbers go: read back from what each sink wrote."""

from __future__ import annotations

import builtins
import json
import math
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from truestep.files.whole import read_json_lines
from truestep.metrics.sinks import JsonLines, SinkError, TensorBoardSink, TrackioSink, WandbSink

EVALUATION = {
    "step": 2,
    "documents_seen": 16,
    "num_prompts": 4,
    "greedy_reward": 0.5,
    "sampled_reward": 0.25,
    "num_unrated": 0,
    "seconds": 0.1,
    "examples": [{"prompt": "[bold]p[/]", "completion": "c", "reward": 1.0}],
}


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": -0.125 * step,
        "reward": 0.75,
        "new_logprobs": -1.5,
        "ratio_new_old": 1.0001,
        "clipped_ratio_fraction": 0.25,
        "grad_norm": 12.5,
        "tokens_per_second": 12345.6,
        "documents_seen": 8 * step,
        **more,
    }


def test_jsonl_keeps_every_bit_of_a_float(tmp_path: Path) -> None:
    generator = random.Random(0)
    numbers = [struct.unpack("<d", generator.randbytes(8))[0] for _ in range(300)]
    numbers = [number for number in numbers if math.isfinite(number)] + [0.1, -0.0, 5e-324, 1e308, 1 / 3]
    sink = JsonLines(tmp_path / "run" / "metrics.jsonl")
    for step, number in enumerate(numbers):
        sink.step({"step": step, "loss": number})
    sink.evaluation(EVALUATION)  # has a file of its own
    sink.close()
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(len(numbers)))
    assert [struct.pack("<d", line["loss"]) for line in lines] == [struct.pack("<d", number) for number in numbers]


def test_tensorboard_events_hold_steps_and_evaluations(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path / "board"))
    for step in (1, 2, 3):
        sink.step(step_line(step))
    sink.evaluation(EVALUATION)
    sink.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, -0.125), (2, -0.25), (3, -0.375)]
    assert [(event.step, event.value) for event in events.Scalars("documents_seen")] == [(1, 8), (2, 16), (3, 24)]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/greedy_reward")] == [(2, 0.5)]
    assert {"grad_norm", "reward", "evaluation/sampled_reward"} <= set(events.Tags()["scalars"])
    assert not any("examples" in name for name in events.Tags()["scalars"])


def test_tensorboard_shows_rollouts_as_text(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path))
    for step in (1, 2, 10):
        sink.rollouts({"step": step}, [{"step": step, "completion": "a|b\nc\x1b[2J", "reward": 0.5}])
    sink.rollouts({"step": 20}, [])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    texts = events.Tensors("rollouts/text_summary")
    assert [event.step for event in texts] == [1, 10]
    head, _, row = texts[0].tensor_proto.string_val[0].decode().splitlines()
    assert head.startswith("| step | group_id | prompt | completion |")
    assert "| a\\|b ⏎ c\\x1b[2J | 0.5 |" in row


def test_conversations_are_text_in_a_tracker(tmp_path: Path) -> None:
    blocks = [
        {"sequence": 0, "label": False, "text": "what is 1+2"},
        {"sequence": 0, "label": True, "role": "assistant", "text": "a|b"},
        {"sequence": 0, "label": False, "role": None, "text": "further"},
        {"sequence": 1, "label": True, "role": "x\x1b[2J", "text": "3"},
    ]
    sink = TensorBoardSink(str(tmp_path))
    sink.rollouts({"step": 1}, [{"step": 1, "turns": blocks, "ended_by": "max_turns"}, {"step": 1, "completion": "c"}])
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    head, _, row, other = events.Tensors("rollouts/text_summary")[0].tensor_proto.string_val[0].decode().splitlines()
    assert head.endswith("| rejected | ended_by | conversation |")
    conversation = "what is 1+2 ⏎ [assistant] ⏎ a\\|b ⏎ further ⏎ --- sequence 2 --- ⏎ [x\\x1b[2J] ⏎ 3"
    assert row.endswith(f"| max_turns | {conversation} |") and other.count("|") == head.count("|")


def test_tensorboard_forgets_the_steps_that_a_restart_rolled_back(tmp_path: Path) -> None:
    first = TensorBoardSink(str(tmp_path))
    for step in (1, 2, 3):
        first.step(step_line(step, loss=float(step)))
    first.close()
    second = TensorBoardSink(str(tmp_path), done=1)  # the checkpoint was after step 1
    for step in (2, 3, 4):
        second.step(step_line(step, loss=10.0 * step))
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 20), (3, 30), (4, 40)]


def test_wandb_offline_writes_below_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name.lower()))
    run = tmp_path / "run"
    sink = WandbSink(run, project="tests", name="mine", mode="offline", samples_every=10, config={"seed": 0})
    for step in (1, 2):
        sink.step(step_line(step))
        sink.rollouts(step_line(step), [{"step": step, "completion": f"<b>answer {step}", "reward": 1.0}])
    sink.evaluation(EVALUATION)
    summary = dict(sink._run.summary)
    sink.close()
    (directory,) = (run / "wandb").glob("offline-run-*")
    (log,) = directory.glob("*.wandb")
    deadline = time.monotonic() + 120  # wandb's own process writes the last of it
    while b"evaluation/greedy_reward" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    content = log.read_bytes()
    assert b"tokens_per_second" in content
    assert b"evaluation/greedy_reward" in content
    assert summary["loss"] == -0.25
    assert summary["documents_seen"] == 16
    (table,) = (directory / "files" / "media" / "table").glob("rollouts_*.table.json")  # of step 1: then every tenth
    written = json.loads(table.read_text(encoding="utf-8"))
    assert dict(zip(written["columns"], written["data"][0], strict=True))["completion"] == "<b>answer 1"
    assert summary["evaluation/greedy_reward"] == 0.5


# As `truestep train c.yaml OVERRIDES` does: the overrides stand in sys.argv, sinks are made of the configuration.
WANDB_RUN = """
import sys
from pathlib import Path
from rich.console import Console
from truestep.run.assemble.sinks import make_sinks
from truestep.config.load import load_config
from truestep.run.directory import RunDirectory
from truestep.run.terminal.display import Display

config = load_config(Path(sys.argv[2]), sys.argv[3:])
assert "hunter2-secret" in config.data.source.url and "hunter2-secret" in str(sys.argv)
(sink,) = make_sinks(config, RunDirectory(Path(config.checkpoint.directory)), Display(Console()), "title", 0)
assert "hunter2-secret" in str(sys.argv)  # they are hidden from wandb alone
sink.step({"step": 1, "documents_seen": 8, "loss": 0.5})
sink.close()
"""


def test_a_password_given_on_the_command_line_is_in_no_file_of_wandb(tmp_path: Path) -> None:
    config = {
        "model": {"path": "model"},
        "data": {"source": {"type": "stream", "stream": "rollouts"}, "advantages": "none"},
        "loss": {"type": "grpo"},
        "schedule": {"steps": 1, "docs_per_step": 8},
        "checkpoint": {"directory": str(tmp_path / "run")},
        "logging": {"wandb": {"project": "p", "mode": "offline"}, "console": False, "jsonl": False},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(WANDB_RUN)
    folders = {f"WANDB_{name}_DIR": str(tmp_path / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    url = "redis://somebody:hunter2-secret@stream.example:6379/0"
    subprocess.run(
        [sys.executable, "train.py", "train", "c.yaml", "--data.source.url", url],
        cwd=tmp_path,
        env=os.environ | {"WANDB_SILENT": "true"} | folders,
        check=True,
        timeout=300,
    )
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 120  # wandb's own process writes the last of it
    while b"documents_seen" not in log.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".py"}
    assert not [path for path, content in written.items() if b"hunter2" in content]
    assert b"stream.example" in written[log]  # text is found there as it is


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch.utils.tensorboard", "tensorboard"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
    ],
)
def test_without_the_package_the_extra_is_named(
    module: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == module:
            raise ImportError(f"No module named {module!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SinkError, match=rf"pip install 'truestep\[{extra}\]'"):
        if extra == "wandb":
            WandbSink(tmp_path / "run", project="p", name=None, mode="offline", config={})
        elif extra == "trackio":
            TrackioSink(tmp_path / "run", {}, project="p")
        else:
            TensorBoardSink(str(tmp_path / "board"))
    assert list(tmp_path.iterdir()) == []


def test_wandb_that_refuses_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**options: Any) -> None:
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(SinkError, match=r"logging\.wandb: .*wandb login"):
        WandbSink(tmp_path, project="p", name=None, mode="online", config={})


def test_an_evaluation_without_a_mean_leaves_it_out(tmp_path: Path) -> None:
    board = TensorBoardSink(str(tmp_path))
    board.evaluation(EVALUATION | {"greedy_reward": None, "num_unrated": 4, "problems": ["the reward raised KeyError"]})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "evaluation/sampled_reward" in events.Tags()["scalars"]
    assert "evaluation/greedy_reward" not in events.Tags()["scalars"]
