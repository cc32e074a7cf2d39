"""The files of kept rollouts: Parquet, each of a few steps, named by these, complete or absent."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from truestep.files.whole import sync_directory, sync_files
from truestep.text import printable

FOLDER = "rollouts"
_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})\.parquet")

TEXTS = ("id", "group_id", "prompt", "completion", "rejected")
NUMBERS = ("reward", "advantage", "log_ratio", "largest_log_ratio", "entropy")
COUNTS = ("step", "length", "tokens", "model_version", "staleness")
TOKENS = ("token_logprobs", "token_log_ratios", "token_advantages")


def columns() -> Any:
    """Give the columns of a file, as pyarrow's schema."""
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
            # A user's own fields; of one of labels, the mean.
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
        ]
    )


def steps_of(file: Path) -> tuple[int, int] | None:
    """Read the first and the last step from a file's name; None where it is no file of ours."""
    found = _NAME.fullmatch(file.name)
    return (int(found[1]), int(found[2])) if found else None


def list_files(folder: Path) -> list[Path]:
    """List the files in the order of their steps."""
    found = [file for file in folder.iterdir() if steps_of(file)] if folder.is_dir() else []
    return sorted(found, key=lambda file: steps_of(file) or (0, 0))


def write_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write one file of some steps' rows. It has its name once it is complete; `sync` puts it on the disk."""
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
    """Put files on the disk before a checkpoint counts that needs their steps no more."""
    sync_files(files)  # some may be thinned out meanwhile
    if files and folder.is_dir():
        sync_directory(folder)


def roll_back(folder: Path, step: int) -> list[str]:
    """Remove what was kept of later steps. Give a sentence for each file that is not as it should be after that."""
    faults = []
    for file in folder.glob(".*.partial") if folder.is_dir() else ():
        faults += _removed(file)  # a kill left it
    for file in list_files(folder):
        first, last = steps_of(file) or (0, 0)
        if first <= step < last:  # an older checkpoint is gone on from, which stands inside
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
    """Write the part of a file up to a step as a file of its own."""
    try:
        rows = [row for row in read_rows(file) if row["step"] <= step]
        if rows:
            write_rows(file.parent, rows)
    except Exception as error:  # pyarrow raises errors of many kinds for a damaged file
        return [f"{file} cannot be cut off behind step {step}, so all of it is removed: {printable(error)}"]
    return []


def read_rows(file: Path, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of a file, or some columns of them."""
    from pyarrow import parquet

    yield from parquet.read_table(file, columns=names).to_pylist()


def thin(folder: Path, most_bytes: float) -> None:
    """Remove every second file, the first and the last ones aside, until the rest is no more than so many bytes."""
    files = list_files(folder)
    while len(files) > 2 and sum(file.stat().st_size for file in files) > most_bytes:
        gone = files[1:-1:2]
        for file in gone:
            file.unlink()
        files = [file for file in files if file not in set(gone)]
