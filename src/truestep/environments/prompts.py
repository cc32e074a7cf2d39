"""Prompts from a JSONL file or a Hugging Face dataset on disk, tokenised once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.errors import TruestepError


class PromptError(TruestepError):
    pass


@dataclass(frozen=True)
class Prompt:
    id: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    fields: dict[str, Any]  # everything else in the record: handed to the reward
    input_ids: tuple[int, ...]


def load_prompts(path: str | Path, tokenizer: Any) -> list[Prompt]:
    if tokenizer is None:
        raise PromptError("prompts need a tokenizer, and model.path has none")
    source = Path(path)
    records = _read_dataset(source) if source.is_dir() else _read_jsonl(source)
    prompts = []
    for number, record in enumerate(records, start=1):
        where = f"{source}:{number}"
        if not isinstance(record, dict) or "prompt" not in record:
            raise PromptError(f"{where}: a prompt is an object with the field `prompt`")
        fields = {name: value for name, value in record.items() if name not in ("prompt", "id")}
        ids = _tokenise(record["prompt"], tokenizer, where)
        prompts.append(Prompt(str(record.get("id", f"{source.name}:{number}")), record["prompt"], fields, ids))
    if not prompts:
        raise PromptError(f"{source} holds no prompt")
    return prompts


def _tokenise(prompt: Any, tokenizer: Any, where: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        if not tokenizer.chat_template:
            raise PromptError(f"{where}: the prompt is chat messages and the tokenizer has no chat template")
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
            "input_ids"
        ]
    else:
        raise PromptError(f"{where}: `prompt` is neither text nor a list of chat messages")
    if not ids:
        raise PromptError(f"{where}: the prompt has no tokens; nothing could predict its first one")
    return tuple(ids)


def _read_jsonl(path: Path) -> list[Any]:
    if not path.is_file():
        raise PromptError(f"{path} does not exist")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise PromptError(f"{path}:{number}: not JSON: {error}") from error
    return records


def _read_dataset(path: Path) -> list[Any]:
    try:
        import datasets
    except ImportError as error:
        raise PromptError(f"{path} is a directory: reading a dataset needs `pip install truestep[datasets]`") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise PromptError(f"{path} is not a Hugging Face dataset on disk: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise PromptError(f"{path} holds several splits: name one, such as {path / next(iter(loaded))}")
    return list(loaded)
