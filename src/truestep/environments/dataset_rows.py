"""Makes records of prompts of Hugging Face datasets: saved on disk, of files, or by their names on the hub."""

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from truestep.config.sections import DatasetPrompts
from truestep.errors import TruestepError
from truestep.text import printable

_SAVED = ("state.json", "dataset_dict.json")  # one of these is in what save_to_disk writes
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
_DICTIONARY_BATCH, _BATCH = 2, 3  # types of Arrow IPC messages
_PLACE = re.compile(r"\{([^{}]+)\}")  # of a column's value in a template


class PromptError(TruestepError):
    pass


def read(given: DatasetPrompts) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a dataset as records of prompts, numbered from 1."""
    for number, row in _rows(given):
        if number == 1:
            _check_columns(given, row)
        record = dict(row) if given.columns is None else {name: row[column] for name, column in given.columns.items()}
        if given.template is not None:
            record["prompt"] = _filled(given.template, row)
        yield number, record


def _rows(given: DatasetPrompts) -> Iterator[tuple[int, dict[str, Any]]]:
    path = Path(given.dataset).expanduser()
    if any((path / name).is_file() for name in _SAVED):
        yield from read_saved(path, given.split)
        return
    datasets = _package(f"{given.dataset} is a dataset")
    try:
        if path.is_file() and path.suffix in _BUILDERS:
            loaded = datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=given.split or "train")
        else:
            name = str(path) if path.is_dir() else given.dataset
            loaded = datasets.load_dataset(name, given.subset, split=given.split)
        if given.split is None and isinstance(loaded, datasets.DatasetDict):
            loaded = _split_of(loaded, None, given.dataset)
        yield from enumerate(loaded, start=1)
    except TruestepError:
        raise
    except Exception as error:  # of the network, of damaged files, of names that are unknown
        kind = "cannot be read" if path.exists() else "is no file here, and cannot be loaded from the Hugging Face hub"
        raise PromptError(f"{given.dataset} {kind}: {printable(error)}") from error


def _split_of(loaded: Any, split: str | None, source: str) -> Any:
    """Return a split of a dataset that has some by name."""
    names = list(loaded) if isinstance(loaded, Mapping) else []
    if not names:
        raise PromptError(f"{source} has no splits: leave out split: {split}")
    if split is None and len(names) == 1:
        return loaded[names[0]]
    if split not in names:
        wanted = "name one with split" if split is None else f"{split} is none of them"
        raise PromptError(f"{source} has the splits {printable(', '.join(map(str, names)))}: {wanted}")
    return loaded[split]


def _check_columns(given: DatasetPrompts, row: Mapping[str, Any]) -> None:
    has = f"it has {printable(', '.join(row), 300)}"
    for name, column in (given.columns or {}).items():
        if column not in row:
            raise PromptError(f"{given.dataset}: columns.{name} is no column of the dataset: {column}; {has}")
    if given.template is not None:
        texts = (
            [given.template] if isinstance(given.template, str) else [one.get("content", "") for one in given.template]
        )
        if not any(place in row for text in texts for place in _PLACE.findall(text)):
            raise PromptError(f"{given.dataset}: the template has no column of the dataset in braces; {has}")
    elif "prompt" not in (given.columns or row):
        example = f"'{{{next(iter(row), 'question')}}}'"
        raise PromptError(
            f"{given.dataset}: no column makes the prompt: write template, such as {example}, or columns: {{prompt: "
            f"COLUMN}}; {has}"
        )


def _filled(template: str | list[dict[str, str]], row: Mapping[str, Any]) -> str | list[dict[str, str]]:
    """Put the values of columns into a template. Braces around anything else stay as they are."""
    if isinstance(template, str):
        return _PLACE.sub(lambda place: str(row[place[1]]) if place[1] in row else place[0], template)
    return [{**message, "content": str(_filled(message.get("content", ""), row))} for message in template]


def _package(what: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise PromptError(f"{what}: reading a dataset needs `pip install 'truestep[datasets]'`") from error
    datasets.disable_progress_bars()
    return datasets


def read_saved(path: Path, split: str | None = None) -> Iterator[tuple[int, Any]]:
    datasets = _package(f"{path} is a directory")
    import pyarrow as pa

    _refuse_compressed(path)
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # damaged files raise KeyError, TypeError, Arrow's errors, UnicodeDecodeError
        raise PromptError(f"{path} is not a Hugging Face dataset on disk: {printable(error)}") from error
    if isinstance(loaded, datasets.DatasetDict) and split is None:
        raise PromptError(f"{path} holds several splits: name one, such as {path / next(iter(loaded))}")
    if split is not None:
        loaded = _split_of(loaded, split, str(path))
    try:
        yield from enumerate(loaded, start=1)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise PromptError(f"{path} cannot be read: {printable(error)}") from error


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
            raise PromptError(f"{file} is compressed inside, and is not read: write it with `save_to_disk`")


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
