"""Prompts: what is read, and one message with file and line for whatever cannot be."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from small_runs import sort_prompts, word_model, write_lines
from truestep.environments.prompts import PromptError, load_prompts

REFUSING = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no role ' ~ m.role) }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("prompts") / "model")


@pytest.fixture
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def test_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "sort 2 1 =", "answer": "1 2", "level": 3}])
    (prompt,) = load_prompts(file, tokenizer)
    assert prompt.id == "p.jsonl:1"
    assert prompt.fields == {"answer": "1 2", "level": 3}
    assert list(prompt.input_ids) == tokenizer("sort 2 1 =")["input_ids"]


def test_ids_are_the_records_own(tokenizer: Any, tmp_path: Path) -> None:
    records = [{"prompt": "1", "id": "mine"}, {"prompt": "1", "id": 7}, {"prompt": "1", "id": None}]
    prompts = load_prompts(write_lines(tmp_path / "p.jsonl", records), tokenizer)
    assert [prompt.id for prompt in prompts] == ["mine", "7", "p.jsonl:3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not JSON"),
        ('{"prompt": "1"', "not JSON"),
        ("[1, 2]", "an object with the field `prompt`"),
        ('"sort"', "an object with the field `prompt`"),
        ('{"question": "1"}', "an object with the field `prompt`"),
        ('{"prompt": 5}', "neither text nor a list"),
        ('{"prompt": null}', "neither text nor a list"),
        ('{"prompt": ["1"]}', "neither text nor a list"),
        ('{"prompt": ""}', "no tokens"),
        ('{"prompt": "a\\ud800"}', "surrogate"),
        (
            '{"prompt": [{"role": "user", "content": "1"}]}',
            "no chat template: write the prompt as text, or take a model",
        ),
        ('{"question": "1", "answer": 2}', "with the field `prompt`; it has question, answer"),
        ("question,answer", 'a prompt is an object with the field `prompt`: {"prompt": "2 + 2 =", "answer": "4"}'),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "1"}}\n\n   \n{line}\n{{"prompt": "2"}}\n', encoding="utf-8")
    with pytest.raises(PromptError) as caught:
        load_prompts(file, tokenizer)
    assert str(caught.value).startswith(f"{file}:4: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("messages", [[], [{"role": "robot", "content": "1"}], [{"content": "1"}]])
def test_messages_that_the_template_refuses(messages: list[Any], tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = REFUSING
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "1"}]}, {"prompt": messages}])
    with pytest.raises(PromptError, match="p.jsonl:2: the chat template refuses"):
        load_prompts(file, tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_model(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.add_tokens(["new"])
    file = write_lines(tmp_path / "p.jsonl", [{"prompt": "1"}, {"prompt": "1 new"}])
    assert len(load_prompts(file, tokenizer, vocabulary_size=15)) == 2
    with pytest.raises(PromptError, match=r"p\.jsonl:2: .*token id 14.*vocabulary has 14"):
        load_prompts(file, tokenizer, vocabulary_size=14)


def test_a_file_that_is_no_utf8(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "1"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match=r"p\.jsonl:2: not UTF-8"):
        load_prompts(file, tokenizer)


def test_line_separators_inside_of_text_end_no_line(tokenizer: Any, tmp_path: Path) -> None:
    text = "sort\u2028 1 \x85 2\u2029 ="
    file = tmp_path / "p.jsonl"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    file.write_bytes(f"\ufeff{line}\r\n{line}".encode())  # a byte order mark, Windows line ends, no last line end
    prompts = load_prompts(file, tokenizer)
    assert [prompt.prompt for prompt in prompts] == [text, text]


def test_nothing_to_read(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"missing\.jsonl does not exist"):
        load_prompts(tmp_path / "missing.jsonl", tokenizer)
    with pytest.raises(PromptError, match="holds no prompt"):
        load_prompts(write_lines(tmp_path / "p.jsonl", []), tokenizer)
    with pytest.raises(PromptError, match="need a tokenizer"):
        load_prompts(write_lines(tmp_path / "p.jsonl", [{"prompt": "1"}]), None)


def test_a_dataset_on_disk_is_its_jsonl(tokenizer: Any, tmp_path: Path) -> None:
    records = sort_prompts(6)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "set"))
    assert load_prompts(tmp_path / "set", tokenizer) == load_prompts(
        write_lines(tmp_path / "p.jsonl", records), tokenizer
    )


def test_several_splits_say_which_to_name(tokenizer: Any, tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(sort_prompts(2))
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(PromptError) as caught:
        load_prompts(tmp_path / "set", tokenizer)
    assert str(tmp_path / "set" / "train") in str(caught.value)
    assert len(load_prompts(tmp_path / "set" / "train", tokenizer)) == 2


def test_any_other_directory_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="is not a Hugging Face dataset on disk"):
        load_prompts(tmp_path, tokenizer)


def test_without_datasets_the_extra_is_named(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PromptError, match=r"pip install 'truestep\[datasets\]'"):
        load_prompts(tmp_path, tokenizer)


def test_a_field_that_no_message_can_carry_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["sort 2 1 ="], "image": [b"\xff\x00"]}).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(PromptError, match="the field `image` is of type bytes; a reward gets text, numbers"):
        load_prompts(tmp_path / "data", tokenizer)
