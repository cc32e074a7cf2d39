"""examples/boxes: the task needs three turns, and a tiny model learns it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT
from server.vllm_server import NAME, Starter, VllmServer
from small_runs import quiet_trainer, read_lines, write_lines
from truestep import Answer
from truestep.config.load import load_config
from truestep.tools.export import export

sys.path.insert(0, str(ROOT))
try:
    from examples.boxes import boxes, prepare
finally:
    del sys.path[0]

BOXES = ROOT / "examples" / "boxes"
ENOUGH = 0.9


def held_out() -> list[dict[str, Any]]:
    return [dict(row) for row in boxes.Boxes.rows({}, True) or ()]


def test_fewer_turns_are_right_in_one_room_of_five_at_most() -> None:
    """The best guess behind the prompt, and behind what one box holds."""
    rows = held_out()
    assert {row["prompt"][0]["content"] for row in rows}.isdisjoint(
        row["prompt"][0]["content"] for row in boxes.Boxes.rows({}, False)
    )
    for seen in (lambda row: row["first"], lambda row: row["boxes"][row["first"]], lambda row: row["boxes"][0]):
        answers = Counter((seen(row), row["answer"]) for row in rows)
        best = {what: max(n for (other, _), n in answers.items() if other == what) for what, _ in answers}
        assert sum(best.values()) / len(rows) < 0.35, "which fits what it guesses to the answers of these rooms"
    assert max(Counter(row["answer"] for row in rows).values()) / len(rows) < 0.2


def test_two_boxes_lead_to_the_answer() -> None:
    for row in held_out()[:20]:
        environment = boxes.Boxes()
        environment.row = row
        second = environment.open(row["first"])
        assert environment.open(int(second)) == row["answer"] and environment.open(99) == "nothing"
        assert environment.finish(Answer(row["answer"])) == 1.0
        assert environment.finish(Answer(second)) == environment.finish(Answer("")) == 0.0


def test_the_words_of_the_model_are_those_of_its_conversations() -> None:
    tokenizer = prepare.make_tokenizer()
    for messages in boxes.demonstrations("words", 20):
        chat = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert tokenizer.unk_token_id not in chat
        assert tokenizer.decode(chat) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has imitated the demonstrations."""
    folder = tmp_path_factory.mktemp("boxes")
    prepare.make_model(folder / "model")
    lines = [{"id": str(number), "messages": chat} for number, chat in enumerate(boxes.demonstrations("", 3200))]
    write_lines(folder / "demonstrations.jsonl", lines)
    trained(folder, "warm-up", **{"model.path": folder / "model", "data.path": folder / "demonstrations.jsonl"})
    export(folder / "warm-up", folder / "warm-model", dtype="float32")
    return folder / "warm-model"


def trained(folder: Path, name: str, **others: Any) -> Path:
    given = {"checkpoint.directory": folder / name, "logging.console": "false", **others}
    config = load_config(BOXES / f"{name}.yaml", [f"--{option}={value}" for option, value in given.items()])
    quiet_trainer(config).run()
    return folder / name


def check(run: Path) -> None:
    accuracy = [line["pass@1"] for line in read_lines(run / "evaluation.jsonl")]
    assert accuracy[0] < 0.5 and max(accuracy[1:3]) >= ENOUGH, accuracy
    assert [line["policy_turns"] for line in read_lines(run / "metrics.jsonl")][-1] > 2.9
    for line in read_lines(run / "metrics.jsonl"):
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-4)


@pytest.mark.long
def test_a_tiny_model_learns_it_in_process(warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(trained(tmp_path, "train", **{"model.path": warm, "schedule.steps": 20}))


def by_the_program(tmp_path: Path) -> dict[str, Any]:
    """The same task, played by a program with OpenAI's package."""
    command = {"type": "command", "run": [sys.executable, str(BOXES / "agent.py")], "preload": ["openai"]}
    prompts = [dict(row) for row in boxes.Boxes.rows({}, False) or ()]
    return {
        "sampler.environment": json.dumps(command),
        "sampler.prompts": write_lines(tmp_path / "prompts.jsonl", prompts),
        "evaluation.prompts": write_lines(tmp_path / "held-out.jsonl", held_out()),
    }


@pytest.mark.release  # 1152 episodes
@pytest.mark.timeout(1200)
def test_a_tiny_model_learns_it_by_the_program_with_openais_package(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    fewer = {"schedule.docs_per_step": 32, "schedule.steps": 30, "evaluation.every": 15, "evaluation.max_prompts": 64}
    check(trained(tmp_path, "train", **{"model.path": warm, **by_the_program(tmp_path), **fewer}))


@pytest.mark.nightly
def test_the_program_with_openais_package_is_trained_as_it_is(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    given = by_the_program(tmp_path)
    given |= {"schedule.steps": 2, "schedule.docs_per_step": 16, "optimizer.warmup_steps": 0}
    del given["evaluation.prompts"]
    given["evaluation"] = "null"
    for line in read_lines(trained(tmp_path, "train", **{"model.path": warm, **given}) / "metrics.jsonl"):
        assert line["num_documents"] == line["num_sequences"] == 16, "a conversation is one sequence"
        assert line["policy_turns"] > 2 and 0 < line["reward"] < 1
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-4)


@pytest.fixture(scope="module")
def server(warm: Path) -> Iterator[VllmServer]:
    python = os.environ.get("TRUESTEP_VLLM")
    if not python:
        pytest.skip("TRUESTEP_VLLM does not name the Python of a vLLM: `make vllm` installs one and prints it")
    starter = Starter(python, warm.with_name("starter.log"))
    made = VllmServer(starter, warm, warm.with_name("vllm.log"), others=("--max-model-len", "128"))
    try:
        made.start()
        made.wait()
        yield made
    finally:
        made.kill()
        starter.stop()


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_tiny_model_learns_it_through_a_real_vllm(
    warm: Path, server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    through = {"sampler.type": "server", "sampler.urls": f'["{server.url}"]', "sampler.model": NAME}
    check(trained(tmp_path, "train", **{"model.path": warm, "schedule.steps": 20, **through}))


@pytest.mark.parametrize("box", [12, -1])
def test_the_program_finds_nothing_in_a_box_that_is_not_there(box: int, tmp_path: Path) -> None:
    """A client stands in the place of OpenAI's, which asks for the box, and then answers what it was told."""
    client = f"""
from types import SimpleNamespace as Made
class OpenAI:
    def __init__(self):
        self.chat = Made(completions=self)
    def create(self, messages, **_):
        told = messages[-1]
        call = Made(id="1", function=Made(name="open", arguments='{{"box": {box}}}'))
        done = told["role"] == "tool"
        message = Made(tool_calls=None if done else [call], content=told["content"] if done else "")
        return Made(choices=[Made(message=message)])
"""
    (tmp_path / "openai.py").write_text(client, encoding="utf-8")
    row = {**held_out()[0], "answer": "nothing"}
    done = subprocess.run(
        [sys.executable, str(BOXES / "agent.py")],
        input=json.dumps(row),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert json.loads(done.stdout) == {"reward": 1.0}, done.stderr
