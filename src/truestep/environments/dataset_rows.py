"""Makes records of prompts of Hugging Face datasets: saved on disk, of files, or by their names on the hub."""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from truestep.config.sections import DatasetPrompts
from truestep.errors import TruestepError
from truestep.text import printable

_SAVED = ("state.json", "dataset_dict.json")  # one of these is in what save_to_disk writes
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
_DICTIONARY_BATCH, _BATCH = 2, 3  # types of Arrow IPC messages
# In a template, a double brace is a brace of the text, and {COLUMN} is a value.
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_COMMAND = re.compile(r"\\[A-Za-z]+$")  # of LaTeX, such as \boxed, whose braces are easily taken for a column's
_PART = re.compile(r"([^\[\]]+)\[(-?\d*):(-?\d*)\]")  # a part of a split, such as train[:100]


class PromptError(TruestepError):
    pass


def read(given: DatasetPrompts) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a dataset as records of prompts, numbered from 1."""
    loaded = _loaded(given)
    asked = _check_columns(given, loaded.column_names)
    if given.columns is not None:  # other columns are not decoded: they may be images
        loaded = loaded.select_columns([name for name in loaded.column_names if name in asked])
    for number, row in _rows(loaded, given.dataset):
        record = dict(row) if given.columns is None else {name: row[column] for name, column in given.columns.items()}
        if given.template is not None:
            record["prompt"] = _filled(given.template, row, f"{given.dataset}:{number}")
        yield number, record


def _loaded(given: DatasetPrompts) -> Any:
    path = Path(given.dataset).expanduser()
    saved = any((path / name).is_file() for name in _SAVED)
    if saved or (path.is_file() and path.suffix in _BUILDERS):
        for name in ("subset", "revision"):
            if getattr(given, name) is not None:
                raise PromptError(f"{given.dataset}: {name} is for datasets on the hub, and this is on disk: remove it")
    if saved:
        return _load_saved(path, given.split)
    datasets = _package(f"{given.dataset} is a dataset")
    try:
        if path.is_file() and path.suffix in _BUILDERS:
            loaded = datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=given.split or "train")
        else:
            name = str(path) if path.is_dir() else given.dataset
            loaded = datasets.load_dataset(name, given.subset, split=given.split, revision=given.revision)
    except Exception as error:  # errors of the network, damaged files, unknown names
        kind = "cannot be read" if path.exists() else "is no file here, and cannot be loaded from the Hugging Face hub"
        raise PromptError(f"{given.dataset} {kind}: {printable(error)}") from error
    several = given.split is None and isinstance(loaded, datasets.DatasetDict)
    return _split_of(loaded, None, given.dataset) if several else loaded


def _split_of(loaded: Any, split: str | None, source: str) -> Any:
    """Return a split of a dataset that has some by name, or a part of it: train[:1000]."""
    names = list(loaded) if isinstance(loaded, Mapping) else []
    if not names:
        raise PromptError(f"{source} has no splits: leave out split: {split}")
    if split is None and len(names) == 1:
        return loaded[names[0]]
    part = None if split is None else _PART.fullmatch(split)
    if part is not None and part[1] in names:
        rows = loaded[part[1]]
        return rows.select(range(*slice(*(int(end) if end else None for end in part.group(2, 3))).indices(len(rows))))
    if split not in names:
        wanted = "name one with split" if split is None else f"{split} is none of them"
        raise PromptError(f"{source} has the splits {printable(', '.join(map(str, names)))}: {wanted}")
    return loaded[split]


def _check_columns(given: DatasetPrompts, names: Sequence[str]) -> set[str]:
    """Raise PromptError if a column or the template does not fit the dataset. Return the columns that are used."""
    has = f"it has {printable(', '.join(names), 300)}"
    columns = given.columns or {}
    for name, column in columns.items():
        if column not in names:
            raise PromptError(f"{given.dataset}: columns.{name} is no column of the dataset: {column}; {has}")
    if given.template is not None:
        if "prompt" in columns:
            raise PromptError(f"{given.dataset}: columns.prompt and template both make the prompt: remove one of them")
        return {*columns.values(), *_places(given, names, has)}
    if "prompt" not in (given.columns or names):
        example = f"'{{{next(iter(names), 'question')}}}'"
        raise PromptError(
            f"{given.dataset}: no column makes the prompt: write template, such as {example}, or columns: {{prompt: "
            f"COLUMN}}; {has}"
        )
    return set(columns.values())


def _places(given: DatasetPrompts, names: Sequence[str], has: str) -> set[str]:
    """Return the columns in braces of a template. Raise PromptError for other braces."""
    assert given.template is not None
    parts = [given.template] if isinstance(given.template, str) else [one.get("content", "") for one in given.template]
    found: set[str] = set()
    for text in parts:
        for place in _BRACES.finditer(text):
            braces, column = place[0], place[1]
            if braces in ("{{", "}}"):
                continue
            if column not in names:
                what = "a brace that is alone" if column is None else f"{printable(braces, 60)}, which is no column"
                raise PromptError(
                    f"{given.dataset}: the template has {what}; {has}. A brace of the text itself is written twice: "
                    "{{ and }}"
                )
            command = _COMMAND.search(text[: place.start()])
            if command is not None:
                raise PromptError(
                    f"{given.dataset}: {command[0]}{braces} in the template would put the column {column} into the "
                    f"prompt. If you mean the word, write {command[0]}{{{braces}}}; if you mean the column, "
                    f"{command[0]}{{{{{braces}}}}}"
                )
            found.add(column)
    if not found:
        raise PromptError(f"{given.dataset}: the template has no column of the dataset in braces; {has}")
    return found


def _filled(template: str | list[dict[str, str]], row: Mapping[str, Any], where: str) -> str | list[dict[str, str]]:
    """Put the values of columns into a template."""
    if not isinstance(template, str):
        return [{**message, "content": str(_filled(message.get("content", ""), row, where))} for message in template]

    def value(place: re.Match[str]) -> str:
        if place[0] in ("{{", "}}"):
            return place[0][0]
        found = row[place[1]]
        if not isinstance(found, str | int | float):
            kind = "null" if found is None else f"a {type(found).__name__}"
            raise PromptError(f"{where}: the column {place[1]} of the template is {kind}, not text or a number")
        return str(found)

    return _BRACES.sub(value, template)


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise PromptError(f"{what}: reading a dataset needs `pip install 'truestep[datasets]'`") from error
    datasets.disable_progress_bars()
    return datasets


def read_saved(path: Path) -> Iterator[tuple[int, Any]]:
    yield from _rows(_load_saved(path, None), str(path))


def _load_saved(path: Path, split: str | None) -> Any:
    datasets = _package(f"{path} is a directory")
    _refuse_compressed(path)
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # damaged files raise KeyError, TypeError, Arrow's errors, UnicodeDecodeError
        raise PromptError(f"{path} is not a Hugging Face dataset on disk: {printable(error)}") from error
    if isinstance(loaded, datasets.DatasetDict) and split is None:
        raise PromptError(f"{path} holds several splits: name one, such as {path / next(iter(loaded))}")
    return loaded if split is None else _split_of(loaded, split, str(path))


def _rows(loaded: Any, source: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a dataset, numbered from 1."""
    rows = iter(loaded)
    for number in range(1, len(loaded) + 1):
        try:
            row = next(rows)
        except Exception as error:  # damaged files, images that cannot be decoded
            raise PromptError(f"{source} cannot be read: {printable(error)}") from error
        yield number, row


def _refuse_compressed(path: Path) -> None:
    """Raise PromptError for compressed Arrow files, which could decompress to any size. `datasets` writes none."""
    import pyarrow as pa

    for file in sorted(path.rglob("*.arrow")):
        try:
            with pa.memory_map(str(file)) as source:
                messages = pa.ipc.MessageReader.open_stream(source)
                compressed = any(_is_compressed(message.metadata.to_pybytes()) for message in messages)
        except (OSError, ValueError, pa.ArrowException, struct.error):
            continue  # `datasets` reports the error
        if compressed:
            raise PromptError(f"{file} has compressed data, which is not read: write it with `save_to_disk`")


def _is_compressed(message: bytes) -> bool:
    """Return whether a message of Arrow's stream format is a compressed batch.

    The metadata is a flatbuffer: `header` is field 2 of a message, `data` field 1 of a dictionary batch, `compression`
    field 3 of a record batch.
    """
    table = struct.unpack_from("<I", message)[0]
    kind = _flat_field(message, table, 1)
    batch = _flat_field(message, table, 2)
    if kind is None or batch is None:
        return False
    place, number = batch + struct.unpack_from("<I", message, batch)[0], message[kind]
    if number == _DICTIONARY_BATCH and (inner := _flat_field(message, place, 1)) is not None:
        place, number = inner + struct.unpack_from("<I", message, inner)[0], _BATCH
    return number == _BATCH and _flat_field(message, place, 3) is not None


def _flat_field(content: bytes, table: int, number: int) -> int | None:
    """Return the offset of a field's value in a flatbuffer table, or None if the table lacks the field."""
    fields = table - struct.unpack_from("<i", content, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", content, fields)[0]:
        return None
    offset = struct.unpack_from("<H", content, fields + 4 + 2 * number)[0]
    return table + offset if offset else None
