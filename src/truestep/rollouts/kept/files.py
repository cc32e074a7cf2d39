"""The Parquet files of kept rollouts, each for a range of steps that is in its name. Files are complete or absent."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from truestep.files.whole import sync_directory, sync_files
from truestep.text import printable

FOLDER = "rollouts"
_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")


def columns() -> Any:
    """Return the pyarrow schema of a file."""
    import pyarrow as arrow

    return arrow.schema(
        [
            ("step", arrow.int64()),
            ("id", arrow.string()),
            ("group_id", arrow.string()),
            ("prompt", arrow.string()),
            ("completion", arrow.string()),
            ("reward", arrow.float64()),
            ("rewards", arrow.map_(arrow.string(), arrow.float64())),
            # The user's fields. For a field of labels, the mean over the labels.
            ("fields", arrow.map_(arrow.string(), arrow.float64())),
            ("advantage", arrow.float64()),
            ("length", arrow.int64()),
            ("tokens", arrow.int64()),
            ("truncated", arrow.bool_()),
            ("model_version", arrow.int64()),
            ("staleness", arrow.int64()),
            ("log_ratio", arrow.float64()),
            ("largest_log_ratio", arrow.float64()),
            ("entropy", arrow.float64()),
            ("rejected", arrow.string()),
            ("token_texts", arrow.list_(arrow.string())),
            ("token_logprobs", arrow.list_(arrow.float32())),
            ("token_log_ratios", arrow.list_(arrow.float32())),
            ("token_advantages", arrow.list_(arrow.float32())),
            ("ended_by", arrow.string()),
            ("turns", arrow.list_(arrow.struct(_block(arrow)))),
        ]
    )


def _block(arrow: Any) -> list[tuple[str, Any]]:
    """Return the fields of a block of a conversation (`kept/conversation.py`)."""
    use = arrow.struct([("name", arrow.string()), ("calls", arrow.int64()), ("seconds", arrow.float64())])
    return [
        ("sequence", arrow.int64()),
        ("turn", arrow.int64()),
        ("role", arrow.string()),
        ("label", arrow.bool_()),
        ("tokens", arrow.int64()),
        ("text", arrow.string()),
        ("reward", arrow.float64()),
        ("drawing_seconds", arrow.float64()),
        ("environment_seconds", arrow.float64()),
        ("malformed", arrow.int64()),
        ("tools", arrow.list_(use)),
    ]


def steps_of(file: Path) -> tuple[int, int] | None:
    """Return the first and last step in a file's name, or None for other files."""
    found = _NAME.fullmatch(file.name)
    return (int(found[1]), int(found[2])) if found else None


def list_files(folder: Path) -> list[Path]:
    """Return the files in step order."""
    found = [file for file in folder.iterdir() if steps_of(file)] if folder.is_dir() else []
    return sorted(found, key=lambda file: steps_of(file) or (0, 0))


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows to a file and rename it when it is complete. The file is not yet synced: see `sync`."""
    import pyarrow as arrow
    from pyarrow import parquet

    first, last = rows[0]["step"], rows[-1]["step"]
    file = folder / f"steps-{first:08}-{last:08}.parquet"
    return _put(file, arrow.Table.from_pylist(list(rows), schema=columns()), parquet)


def _put(file: Path, table: Any, parquet: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        parquet.write_table(table, partial, compression="zstd")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def sync(folder: Path, files: Sequence[Path]) -> None:
    """Sync files to disk. Called before a checkpoint completes, since a restart from it does not repeat their steps."""
    sync_files(files)  # some may have been removed by `thin`
    if files and folder.is_dir():
        sync_directory(folder)


def roll_back(folder: Path, step: int) -> list[str]:
    """Remove the rows of steps after `step`. Returns an error message for each file where this failed."""
    faults = []
    for file in folder.glob(".*.partial") if folder.is_dir() else ():
        faults += _removed(file)  # left by a killed process
    for file in list_files(folder):
        first, last = steps_of(file) or (0, 0)
        if first <= step < last:  # the run resumes from an older checkpoint, inside this file's steps
            faults += _cut(file, step)
        if last > step:
            faults += _removed(file)
    return faults


def _removed(file: Path) -> list[str]:
    try:
        file.unlink()
    except OSError as error:
        return [f"{file} holds steps that were rolled back, and cannot be removed: {printable(error)}"]
    return []


def _cut(file: Path, step: int) -> list[str]:
    """Write the rows of a file up to a step to a new file."""
    try:
        rows = [row for row in read_rows(file) if row["step"] <= step]
        if rows:
            write_rows(file.parent, rows)
    except Exception as error:  # pyarrow raises many kinds of errors for a damaged file
        return [f"{file} cannot be cut off after step {step}, so all of it is removed: {printable(error)}"]
    return []


def read_rows(file: Path, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, with all columns or the given ones."""
    from pyarrow import parquet

    yield from parquet.read_table(file, columns=names).to_pylist()


def thin(folder: Path, most_bytes: float) -> None:
    """Remove every second file, except the first and last, until at most `most_bytes` remain."""
    files = list_files(folder)
    while len(files) > 2 and sum(file.stat().st_size for file in files) > most_bytes:
        gone = files[1:-1:2]
        for file in gone:
            file.unlink()
        files = [file for file in files if file not in set(gone)]
