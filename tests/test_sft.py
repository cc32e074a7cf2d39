"""Supervised fine-tuning from chat messages: the loss is transformers' own, held-out loss too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from rollouts.chat_models import FAMILIES, make_chat_model
from small_runs import file_config, quiet_trainer, read_lines, write_lines
from truestep.commands.cli import main
from truestep.config.load import load_config
from truestep.model.loading.read import load_tokenizer
from truestep.rollouts.chat import ChatTemplate
from truestep.tools.export import export
from truestep.tools.score import score


def conversations(count: int, first: int = 0) -> list[dict[str, Any]]:
    records = []
    for number in range(first, first + count):
        messages = []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": f"{number} + {turn}?"})
            messages.append({"role": "assistant", "content": f"It is {number + turn}." + "!" * (number % 4)})
        records.append({"id": f"chat-{number}", "messages": messages})
    return records


def theirs(model: Path, records: list[dict[str, Any]]) -> tuple[float, int]:
    """transformers' own loss of each document, weighed by its labels, and the number of labels."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    chat, total, count = ChatTemplate(lambda: load_tokenizer(model)), 0.0, 0
    for record in records:
        read = chat.read(record)
        ids = torch.tensor([read["input_ids"]])
        mask = torch.tensor([read["loss_mask"]])
        with torch.no_grad():
            loss = policy(input_ids=ids, labels=torch.where(mask == 1, ids, -100)).loss
        total += float(loss) * int(mask.sum())
        count += int(mask.sum())
    return total / count, count


def sft(model: Path, directory: Path, **sections: Any) -> Any:
    train = write_lines(directory / "train.jsonl", conversations(12))
    base = {
        "loss": {"type": "cross_entropy"},
        "data": {"tokens_per_microbatch": 400},
        "schedule": {"docs_per_step": 12},
    }
    for name, section in base.items():
        sections[name] = {**section, **sections.get(name, {})}
    return file_config(model, train, directory / "run", **sections)


@pytest.mark.parametrize("family", ["llama3", "qwen", "mistral", "gemma", "granite"])
def test_the_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", family)
    config = sft(model, tmp_path, data={"advantages": "group_normalized"})
    result = score(config, tmp_path / "out", gradients=False)
    expected, labels = theirs(model, conversations(12))
    assert result.step["num_labels"] == labels and result.step["num_documents"] == 12
    assert result.step["num_micro_batches"] > 1
    assert result.step["loss"] == pytest.approx(expected, rel=1e-5)


def test_held_out_loss_is_over_labels_and_falls(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", "qwen")
    held_out = write_lines(tmp_path / "held_out.jsonl", [*conversations(5, first=3), {"messages": []}])
    config = sft(
        model,
        tmp_path,
        data={"epochs": 8},
        evaluation={"path": str(held_out), "every": 4},
        loss={"normalize_by": "document_means"},
    )
    quiet_trainer(config).run()
    lines = read_lines(tmp_path / "run" / "evaluation.jsonl")
    expected, labels = theirs(model, conversations(5, first=3))
    assert [line["step"] for line in lines] == [0, 4, 8]
    assert lines[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert {(line["num_documents"], line["num_labels"], line["num_rejected"]) for line in lines} == {(5, labels, 1)}
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    export(tmp_path / "run", tmp_path / "exported", "float32")
    assert lines[-1]["loss"] == pytest.approx(theirs(tmp_path / "exported", conversations(5, first=3))[0], rel=1e-5)


def test_data_check_understands_messages(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", "llama3")
    chats = write_lines(tmp_path / "chats.jsonl", conversations(3))
    done = CliRunner().invoke(main, ["data", "check", str(chats), "--model", str(model)])
    assert done.exit_code == 0 and "3 documents" in done.output, done.output
    without = CliRunner().invoke(main, ["data", "check", str(chats)])
    assert "data check needs --model" in without.output


def test_messages_are_for_supervised_losses(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", "llama3")
    config = sft(model, tmp_path, loss={"type": "grpo"})
    with pytest.raises(Exception, match="input_ids is missing"):
        quiet_trainer(config)


def test_the_example_trains(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model", "qwen")
    root = Path(__file__).parents[1]
    chats = str(root / "examples" / "chats.jsonl")
    over = [f"--model.path={model}", f"--data.path={chats}", f"--evaluation.path={chats}"]
    over += [f"--checkpoint.directory={tmp_path / 'run'}", "--optimizer.learning_rate=0.01", "--logging.console=false"]
    quiet_trainer(load_config(root / "examples" / "sft.yaml", over)).run()
    losses = [line["loss"] for line in read_lines(tmp_path / "run" / "evaluation.jsonl")]
    assert len(losses) == 2 and losses[-1] < losses[0]


def test_every_family_is_tested() -> None:
    assert {"llama3", "qwen", "mistral", "gemma", "granite"} <= set(FAMILIES)
    json.dumps(conversations(1))
