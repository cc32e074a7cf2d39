"""`truestep init` writes a task that runs as it is: its test passes, it trains, and it goes on after a stop."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from small_runs import quiet_trainer
from truestep.config.load import load_config
from truestep.errors import TruestepError
from truestep.files.whole import read_json_lines
from truestep.tools.init.make import HELD_OUT, PROMPTS, init
from truestep.tools.init.tasks import TASKS

Model = Callable[[str], Path]


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.long
def test_the_task_runs_as_it_is(tmp_path: Path) -> None:
    task = tmp_path / "task"
    init(task, None)
    tested = run(task, "pytest", "-q", "-p", "no:cacheprovider", "test_reward.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    _check_tests_itself(task)
    trained = run(task, "truestep", "train", "config.yaml", "--schedule.steps", "2", "--schedule.docs_per_step", "16")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert [line["step"] for line in read_json_lines(task / "run" / "metrics.jsonl")] == [1, 2]
    again = run(task, "truestep", "train", "config.yaml", "--schedule.steps", "3", "--schedule.docs_per_step", "16")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in read_json_lines(task / "run" / "metrics.jsonl")] == [1, 2, 3]


def _check_tests_itself(task: Path) -> None:
    """The README's command, where there is no pytest: it says what passed, and fails where a test does."""
    (task / "pytest.py").write_text("raise ImportError('it is not installed')\n", encoding="utf-8")
    command = [sys.executable, "test_reward.py"]
    tested = subprocess.run(command, cwd=task, capture_output=True, text=True, check=False)
    assert (tested.returncode, tested.stderr) == (0, "")
    assert tested.stdout.count(": passed\n") == 4
    reward = (task / "reward.py").read_text(encoding="utf-8")
    # Of another size: Python takes a compiled file of the same second and size for this one's.
    (task / "reward.py").write_text(reward.replace("return 1.0", "return 0.875"), encoding="utf-8")
    assert "return 0.875" in (task / "reward.py").read_text(encoding="utf-8")
    assert subprocess.run(command, cwd=task, capture_output=True, check=False).returncode == 1
    (task / "reward.py").write_text(reward, encoding="utf-8")
    (task / "pytest.py").unlink()


# Of each template: the options that cut its run, and the test of its own code.
CUT = {
    "math": (("--schedule.docs_per_step", "16", "--evaluation.max_prompts", "4"), "test_reward.py"),
    "json": (("--schedule.docs_per_step", "16", "--evaluation.max_prompts", "4"), "test_reward.py"),
    "tool-agent": (("--schedule.docs_per_step", "32", "--evaluation.max_prompts", "4"), "test_agent.py"),
    "sft": ((), None),
}


@pytest.mark.long
@pytest.mark.parametrize("template", CUT)
def test_each_template_trains_a_tiny_model(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "task"
    written = {path.name for path in init(task, None, template=template)}
    options, test = CUT[template]
    if test is not None:
        tested = subprocess.run([sys.executable, test], cwd=task, capture_output=True, text=True, check=False)
        assert (tested.returncode, tested.stderr) == (0, ""), tested.stderr
        assert tested.stdout.count(": passed\n") >= 3
    monkeypatch.chdir(task)
    steps = 12 if template == "sft" else 3
    config = load_config("config.yaml", [*options, "--schedule.steps", str(steps), "--logging.console", "false"])
    assert config.checkpoint.directory == "run" and config.model.path == "model"
    quiet_trainer(config).run()
    lines = read_json_lines(task / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert any(line["grad_norm"] > 0 for line in lines)
    evaluated = read_json_lines(task / "run" / "evaluation.jsonl")
    if template == "sft":
        assert evaluated[-1]["loss"] < 0.8 * evaluated[0]["loss"]
    if template == "math":
        assert {"easy/pass@4", "hard/sampled_reward_ci"} <= evaluated[-1].keys()
    if template == "tool-agent":  # some words of the tiny model are calls
        assert max(line["tool_calls"] for line in lines) > 0
    assert written >= {"README.md", "config.yaml", "model"} and "run" not in written


@pytest.mark.long
def test_the_template_of_preferences_learns_them(tmp_path: Path) -> None:
    task = tmp_path / "task"
    init(task, None, template="dpo-like")
    config = (task / "config.yaml").read_text(encoding="utf-8")
    assert "steps: 60" in config
    (task / "config.yaml").write_text(config.replace("steps: 60", "steps: 10"), encoding="utf-8")
    trained = subprocess.run([sys.executable, "train.py"], cwd=task, capture_output=True, text=True, check=False)
    assert trained.returncode == 0, trained.stderr
    lines = read_json_lines(task / "run" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and lines[-1]["loss"] < 0.6
    assert lines[-1]["held_out_preferred"] > 0.9
    assert (task / "run" / "trained" / "config.json").is_file()


@pytest.mark.parametrize("template", list(TASKS))
def test_what_a_template_s_readme_names_is_written(template: str, tmp_path: Path, tiny_model: Model) -> None:
    """Its files are there, its commands are commands, and a real model gets data of its own."""
    model = tmp_path / "chat"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}), encoding="utf-8")
    written = {path.name for path in init(tmp_path / "task", model, template=template)}
    text = (tmp_path / "task" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)) | set(re.findall(r"`(\w+\.jsonl)`", text))
    assert named and named <= written
    for line in text.partition("```bash\n")[2].partition("```")[0].splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] in ("python", "truestep") and (words[0] == "truestep" or words[1] in written)
    assert "$" not in text
    config = load_config(tmp_path / "task" / "config.yaml")
    assert config.model.path == str(model)


def test_a_template_of_chats_needs_a_model_of_chats(tmp_path: Path, tiny_model: Model) -> None:
    with pytest.raises(TruestepError, match="--template sft needs a model with a chat template"):
        init(tmp_path / "task", tiny_model("llama"), template="sft")
    with pytest.raises(TruestepError, match="there is no template dpo: there are reward, math"):
        init(tmp_path / "task", None, template="dpo")
    assert not (tmp_path / "task").exists()


def test_a_named_model_gets_its_own_prompts_and_sizes(tmp_path: Path, tiny_model: Model) -> None:
    plain, chat = tiny_model("llama"), tmp_path / "chat"
    chat.mkdir()
    (chat / "config.json").write_text("{}", encoding="utf-8")
    (chat / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}), encoding="utf-8")
    for number, (model, kind) in enumerate(((plain, str), (chat, list))):
        task = tmp_path / f"task-{number}"
        init(task, model)
        config = load_config(task / "config.yaml")
        assert config.model.path == str(model)
        assert config.model.dtype == ("bfloat16" if torch.cuda.is_available() else "float32")
        prompts = read_json_lines(task / "prompts.jsonl")
        assert len(prompts) == PROMPTS
        assert len(read_json_lines(task / "held_out.jsonl")) == HELD_OUT
        assert isinstance(prompts[0]["prompt"], kind)
        assert not (task / "model").exists()


@pytest.mark.parametrize("gpu", [False, True])
def test_the_precision_is_that_of_the_machine(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    init(tmp_path / "task", tmp_path / "model")
    assert load_config(tmp_path / "task" / "config.yaml").model.dtype == ("bfloat16" if gpu else "float32")


def test_the_model_s_path_is_the_one_that_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store" / "3f9a"
    store.mkdir(parents=True)
    (store / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own").symlink_to(store)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "deep" / "er")
    monkeypatch.chdir(tmp_path)
    typed = Path("models/own")
    for task, expected in (("task", "../models/own"), ("linked/task", str(tmp_path / "models/own"))):
        init(Path(task), typed)
        path = load_config(Path(task) / "config.yaml").model.path
        assert path == expected and (Path(task) / path).samefile(store)
    init(Path("absolute"), tmp_path / "models" / "own")
    assert load_config("absolute/config.yaml").model.path == str(tmp_path / "models" / "own")


def test_nothing_is_written_where_something_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(TruestepError, match="is not empty"):
        init(tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_hub_name_is_answered_with_how_to_download_it(tmp_path: Path) -> None:
    with pytest.raises(TruestepError, match="hf download"):
        init(tmp_path / "task", Path("organisation/name"))
    assert not (tmp_path / "task").exists()
