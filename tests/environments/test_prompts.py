"""Prompts: what is read, and one message with file and line for whatever cannot be."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from transformers import AutoTokenizer

from small_runs import sort_prompts, word_model, write_lines
from truestep.config.sections import DatasetPrompts, files_of
from truestep.environments import dataset_rows
from truestep.environments.prompts import PromptError, fields_of, find_prompts, load_prompts

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


ROWS = [{"question": f"{one} + {two} =", "solution": one + two, "level": 1} for one, two in ((1, 2), (3, 4))]
WANTED = [("sort 1 + 2 =", 3), ("sort 3 + 4 =", 7)]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def saved(directory: Path, kind: str) -> dict[str, Any]:
    """Write the rows in one of the forms that data lies about in, and return how to name them."""
    rows = datasets.Dataset.from_list(ROWS)
    if kind == "save_to_disk":
        datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(directory / "set"))
        return {"dataset": str(directory / "set"), "split": "train"}
    if kind == "directory":
        (directory / "set").mkdir()
        rows.to_parquet(directory / "set" / "train-00000.parquet")
        rows.select([0]).to_parquet(directory / "set" / "test-00000.parquet")
        return {"dataset": str(directory / "set"), "split": "train"}
    file = directory / f"rows.{kind}"
    {"parquet": rows.to_parquet, "jsonl": rows.to_json, "csv": rows.to_csv}[kind](file)
    return {"dataset": str(file)}


@pytest.mark.parametrize("kind", ["save_to_disk", "directory", "parquet", "jsonl", "csv"])
def test_columns_and_a_template_make_prompts_of_a_dataset(
    kind: str, tokenizer: Any, tmp_path: Path, own_cache: None
) -> None:
    given = DatasetPrompts(**saved(tmp_path, kind), columns={"answer": "solution"}, template="sort {question}")
    prompts = load_prompts(given, tokenizer)
    assert [(prompt.prompt, prompt.fields["answer"]) for prompt in prompts] == WANTED
    assert all(set(prompt.fields) == {"answer"} for prompt in prompts)
    assert fields_of(given) == [(f"{given.dataset}:1", ["answer"])]
    assert find_prompts(given) == Path(given.dataset)


def test_a_dataset_without_a_map_keeps_its_columns(tokenizer: Any, tmp_path: Path, own_cache: None) -> None:
    given = saved(tmp_path, "parquet")
    prompts = load_prompts(DatasetPrompts(**given, template="{question} {{nothing}} {{{level}}}"), tokenizer)
    assert prompts[0].prompt == "1 + 2 = {nothing} {1}"
    assert prompts[0].fields == ROWS[0] and prompts[0].id == "rows.parquet:1"
    named = load_prompts(DatasetPrompts(**given, columns={"prompt": "question", "id": "level"}), tokenizer, name="math")
    assert (named[1].prompt, named[1].fields, named[1].id, named[1].source) == ("3 + 4 =", {}, "1", "math")


def test_a_template_may_be_a_chat(tmp_path: Path, own_cache: None) -> None:
    chat = [{"role": "system", "content": "{{be short}}"}, {"role": "user", "content": "{question}"}]
    given = DatasetPrompts(**saved(tmp_path, "parquet"), template=chat)
    prompt = next(dataset_rows.read(given))[1]["prompt"]
    assert prompt == [{"role": "system", "content": "{be short}"}, {"role": "user", "content": "1 + 2 ="}]


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("parquet", {}, r"no column makes the prompt: write template, such as '\{question\}'"),
        (
            "parquet",
            {"columns": {"prompt": "text"}},
            "columns.prompt is no column of the dataset: text; it has question, solution",
        ),
        ("parquet", {"template": "{q}"}, r"the template has \{q\}, which is no column; it has question, solution"),
        ("parquet", {"template": "{question.text}"}, "which is no column"),
        ("parquet", {"template": "{question} }"}, "the template has a brace that is alone; it has question, solution"),
        ("parquet", {"template": "solve"}, "the template has no column of the dataset in braces; it has question, sol"),
        (
            "parquet",
            {"template": r"{question} \boxed{solution}"},
            r"If you mean the word, write \\boxed\{\{solution\}\}; if you mean the column, \\boxed\{\{\{solution\}\}\}",
        ),
        ("parquet", {"template": "{question}", "columns": {"prompt": "level"}}, "both make the prompt: remove one"),
        ("save_to_disk", {"subset": "main", "template": "{question}"}, "subset is for datasets on the hub"),
        ("parquet", {"revision": "main", "template": "{question}"}, "revision is for datasets on the hub"),
        ("save_to_disk", {"split": None, "template": "{question}"}, "holds several splits: name one, such as"),
        ("save_to_disk", {"split": "dev", "template": "{question}"}, "has the splits train, test: dev is none of them"),
        ("directory", {"split": None, "template": "{question}"}, "has the splits (test, train|train, test): name one"),
        (
            "parquet",
            {"dataset": "owner/no-such-set"},
            "is no file here, and cannot be loaded from the Hugging Face hub",
        ),
    ],
)
def test_a_dataset_that_does_not_fit_says_what_it_has(
    kind: str, options: dict[str, Any], said: str, tmp_path: Path, own_cache: None
) -> None:
    given = DatasetPrompts(**{**saved(tmp_path, kind), **options})
    with pytest.raises(PromptError, match=said) as caught:
        find_prompts(given, "sampler.prompts")
    assert str(caught.value).startswith(f"sampler.prompts: {given.dataset}") and len(str(caught.value)) < 600


def test_a_part_of_a_split(tokenizer: Any, tmp_path: Path, own_cache: None) -> None:
    for kind in ("save_to_disk", "directory"):
        (tmp_path / kind).mkdir()
        given = saved(tmp_path / kind, kind) | {"split": "train[1:]"}
        prompts = load_prompts(DatasetPrompts(**given, template="{question}"), tokenizer)
        assert [prompt.prompt for prompt in prompts] == ["3 + 4 ="], kind


def test_columns_that_are_not_used_are_not_read(tokenizer: Any, tmp_path: Path, own_cache: None) -> None:
    """Here they are no images, so that decoding one fails. With `most`, the rows behind are not read either."""
    rows = {"question": ["1", "2", None], "image": [{"bytes": b"no image", "path": None}] * 3, "level": [1, 2, 3]}
    features = datasets.Features(
        {"question": datasets.Value("string"), "image": datasets.Image(), "level": datasets.Value("int64")}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    given = DatasetPrompts(dataset=str(tmp_path / "set"), columns={"answer": "level"}, template="sort {question}")
    prompts = load_prompts(given, tokenizer, most=2)
    assert [(prompt.prompt, prompt.fields) for prompt in prompts] == [
        ("sort 1", {"answer": 1}),
        ("sort 2", {"answer": 2}),
    ]
    with pytest.raises(PromptError, match="set:3: the column question of the template is null, not text"):
        load_prompts(given, tokenizer)


def test_prompts_of_a_configuration_are_checked() -> None:
    wrong = {
        "{dataset: a, splits: b}": "prompts.splits: unknown: a dataset has dataset, subset, split",
        "{math: {data: a}}": "prompts.math.dataset: field required: a dataset has dataset",
        "{'a b': c}": "prompts: 'a b' is no name of a source",
        "{}": "prompts: they name no source",
        "{math: [a]}": "prompts.math: input should be a valid dictionary",
    }
    for text, said in wrong.items():
        with pytest.raises(ValueError, match=re.escape(said)):
            files_of(yaml.safe_load(text))
    both = {"math": {"dataset": "a"}, "code": "b.jsonl"}
    assert files_of(both) == {"math": DatasetPrompts(dataset="a"), "code": "b.jsonl"}
    mixture = {"dataset": "a.jsonl", "other": "b.jsonl"}  # a source may have this name
    assert files_of(mixture) == mixture
    assert files_of({"dataset": "a", "split": "train"}) == {"": DatasetPrompts(dataset="a", split="train")}


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
