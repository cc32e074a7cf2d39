"""Prompts from a JSONL file, a Hugging Face dataset or an environment, tokenised once."""

import codecs
import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from truestep.config.sections import DatasetPrompts
from truestep.environments import dataset_rows
from truestep.environments.dataset_rows import PromptError
from truestep.files.bounded import TooLargeError, check_json, read_lines, too_long
from truestep.files.disks import no_file
from truestep.files.whole import LineError, exact_object
from truestep.rollouts.rendering import within_bounds
from truestep.text import printable

# Names that fields cannot have: a reward is called as reward(prompt, completion, **fields), perhaps as a method.
_TAKEN = ("completion", "self")
_MOST_FIELD_SETS = 1000  # largest number of field sets that are checked against a reward's signature


@dataclass(frozen=True)
class Prompt:
    id: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    fields: dict[str, Any]  # all other fields of the record, passed to the reward
    input_ids: tuple[int, ...]
    source: str = ""  # the name of its source in a mixture; empty: there is only one source

    @property
    def record(self) -> dict[str, Any]:
        """The record that environments get."""
        return {"id": self.id, "prompt": self.prompt, **self.fields}


_EXAMPLE = '{"prompt": "2 + 2 =", "answer": "4"}'


def load_prompts(
    given: str | Path | DatasetPrompts,
    tokenizer: Any,
    vocabulary_size: int | None = None,
    name: str = "",
    most: int | None = None,
) -> list[Prompt]:
    """Read the prompts of a file or a dataset. `name` is the name of this source in a mixture. With `most`, only the
    first ones of a dataset are read."""
    if tokenizer is None:
        raise PromptError("prompts need a tokenizer, and model.path has none")
    if isinstance(given, DatasetPrompts):
        rows = islice(dataset_rows.read(given), most)
        return _prompts(rows, given.dataset, name or Path(given.dataset).name, False, tokenizer, vocabulary_size, name)
    source = find_prompts(given)
    is_json = not source.is_dir()  # fields of a dataset may be of any type
    records = _read_jsonl(source) if is_json else islice(dataset_rows.read_saved(source), most)
    return _prompts(records, str(source), name or source.name, is_json, tokenizer, vocabulary_size, name)[:most]


def prompts_of_rows(rows: Iterable[Any], tokenizer: Any, vocabulary_size: int | None = None) -> list[Prompt]:
    """Make prompts of the records that an environment makes itself."""
    if tokenizer is None:
        raise PromptError("prompts need a tokenizer, and model.path has none")
    return _prompts(enumerate(rows, start=1), "the environment's rows", "row", True, tokenizer, vocabulary_size)


def _prompts(
    records: Iterable[tuple[int, Any]],
    source: str,
    short: str,
    is_json: bool,
    tokenizer: Any,
    vocabulary_size: int | None,
    name: str = "",
) -> list[Prompt]:
    """Make prompts of numbered records. Errors name the `source`, and the prompts' ids contain `short`."""
    prompts = []
    for number, record in records:
        where = f"{source}:{number}"
        if not isinstance(record, dict) or "prompt" not in record:
            names = f"; it has {printable(', '.join(record), 100) or 'none'}" if isinstance(record, dict) else ""
            raise PromptError(f"{where}: a prompt is an object with the field `prompt`{names}")
        if taken := next((name for name in _TAKEN if name in record), None):
            raise PromptError(
                f"{where}: a prompt cannot have the field `{taken}`: a reward gets the fields by name, beside the "
                "prompt and the completion, and that name is taken. Give the field another one, such as `reference`"
            )
        fields = {name: value for name, value in record.items() if name not in ("prompt", "id")}
        if not is_json:
            _check_fields(fields, where)
        ids = tokenise(record["prompt"], tokenizer, where)
        if vocabulary_size is not None and max(ids) >= vocabulary_size:
            raise PromptError(
                f"{where}: the tokenizer gives token id {max(ids)}, and the model's vocabulary has {vocabulary_size}"
            )
        prompt_id = f"{short}:{number}" if record.get("id") is None else str(record["id"])
        prompts.append(Prompt(prompt_id, record["prompt"], fields, ids, name))
    if not prompts:
        raise PromptError(f"{source} holds no prompt")
    return prompts


def fields_of(given: str | Path | DatasetPrompts) -> list[tuple[str, list[str]]]:
    """Return each set of fields that prompts pass to the reward, with the first prompt that has it.

    Unreadable files give an empty list, since `load_prompts` reports their errors.
    """
    found: dict[frozenset[str], tuple[str, list[str]]] = {}
    source = Path(given.dataset if isinstance(given, DatasetPrompts) else given)
    try:
        # All rows of a dataset have the same columns.
        records: Iterator[tuple[int, Any]]
        if isinstance(given, DatasetPrompts):
            records = islice(dataset_rows.read(given), 1)
        else:
            records = islice(dataset_rows.read_saved(source), 1) if source.is_dir() else _rough_records(source)
        for number, record in records:
            if frozenset(record) not in found and len(found) < _MOST_FIELD_SETS:
                names = [name for name in record if name not in ("prompt", "id", *_TAKEN)]
                found[frozenset(record)] = f"{source}:{number}", names
    except (PromptError, OSError):
        return []
    return list(found.values())


def _rough_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line.removeprefix(codecs.BOM_UTF8))
                if isinstance(record, dict):
                    yield number, record


def _check_fields(fields: dict[str, Any], where: str) -> None:
    """Raise PromptError for fields that cannot be sent to the worker as JSON."""
    for name, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise PromptError(
                f"{where}: the field `{printable(name)}` is of type {type(value).__name__}; a reward gets text, "
                "numbers, booleans, lists and objects of these: convert the column, or remove it"
            ) from None


def find_prompts(given: str | Path | DatasetPrompts, option: str | None = None) -> Path:
    """Return the path of the prompts if it exists, or a dataset's name if the dataset can be read. `option` is the
    option's name for the error message."""
    if isinstance(given, DatasetPrompts):
        try:
            next(dataset_rows.read(given), None)
        except PromptError as error:
            raise PromptError(f"{option}: {error}" if option else str(error)) from error
        return Path(given.dataset)
    source = Path(given)
    if not source.exists():
        raise PromptError(f"{option}: {source} does not exist" if option else f"{source} does not exist")
    if (kind := no_file(source)) is not None:
        raise PromptError(f"{f'{option}: ' if option else ''}{source} is {kind}, not a file")
    return source


def tokenise(prompt: Any, tokenizer: Any, where: str) -> tuple[int, ...]:
    """Return the ids of a prompt, which is text or chat messages. Error messages say `where` it is."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{where}: the prompt holds half of a surrogate pair, which is not text") from error
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        if not tokenizer.chat_template:
            raise PromptError(
                f"{where}: the prompt is chat messages and the tokenizer has no chat template: write "
                "the prompt as text, or take a model that was trained on chats"
            )
        try:
            chat = within_bounds(
                lambda: tokenizer.apply_chat_template(
                    prompt, add_generation_prompt=True, tokenize=True, return_dict=True
                )
            )
            ids = chat["input_ids"]
        except Exception as error:  # a template is a program from the model's directory: it can raise anything
            raise PromptError(f"{where}: the chat template refuses these messages: {printable(error)}") from error
    else:
        raise PromptError(f"{where}: `prompt` is neither text nor a list of chat messages")
    if not ids:
        raise PromptError(f"{where}: the prompt has no tokens; nothing could predict its first one")
    return tuple(ids)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        with path.open("rb") as file:
            for number, (line, _) in enumerate(read_lines(file), start=1):
                if line is None:
                    raise TooLargeError(too_long())
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if content.strip():
                    check_json(content)
                    yield number, exact_object(content)
    except (LineError, TooLargeError) as error:
        where = f"{path}:{number}"
        raise PromptError(f"{where}: {error}; a prompt is an object with the field `prompt`: {_EXAMPLE}") from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror or error}") from error
