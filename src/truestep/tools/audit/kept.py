"""What a run of truestep has kept: whole records of documents, and rows of some of them that the trainer has scored."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from truestep.files import bounded
from truestep.rollouts.kept import files, records
from truestep.tools.audit.samples import Sample

RECORDS, LEDGER = ".records", "ledger.jsonl"
_MOST_RANGES = 8  # ranges of missing steps that are named


def is_run(path: Path) -> bool:
    return (path / LEDGER).is_file()


def files_of(run: Path) -> list[Path]:
    """Return the files of the documents that a run has kept."""
    folder = run / records.FOLDER
    whole = list(folder.glob(f"*{RECORDS}")) if folder.is_dir() else []
    return [file for file in (*whole, *files.list_files(run / files.FOLDER)) if file.is_file()]


# ---- rows and records of the same documents


def join(samples: Iterable[Sample]) -> list[Sample]:
    """Join the rows and the records of a document. The result has the record's tokens, labels and log-probs, and the
    trainer's log-probs, entropy, staleness and texts from the row. A sample without a partner stays as it is."""
    listed = list(samples)
    kept: tuple[dict[Any, list[int]], dict[Any, list[int]]] = ({}, {})
    for index, one in enumerate(listed):
        if one.document is not None:
            key = (_run_of(one.file), one.step, one.document)
            kept[one.file.endswith(RECORDS)].setdefault(key, []).append(index)
    rows, sequences = kept
    joined: dict[int, Sample | None] = {}
    for key in rows.keys() & sequences.keys():
        each = max(1, len(sequences[key]) // len(rows[key]))  # a document may be in a step twice
        for number, row in enumerate(rows[key]):
            members = sequences[key][number * each : (number + 1) * each]
            found = _joined(listed[row], [listed[index] for index in members])
            joined |= {row: None} | dict(zip(members, found, strict=True))
    whole = (joined.get(index, one) for index, one in enumerate(listed))
    return [one for one in whole if one is not None]


@cache
def _run_of(file: str) -> Path:
    return Path(file).resolve().parent.parent


def _joined(row: Sample, sequences: Sequence[Sample]) -> Iterator[Sample]:
    """Yield the sequences of a document, in order, with the values of the document's row."""
    values = np.zeros(0) if row.trainer is None else row.trainer
    alone, misfits = len(sequences) == 1, row.misfits
    labels = sum(_labels(one) for one in sequences)
    if len(values) > labels:
        misfits = (*misfits, ("token_logprobs", len(values), labels))
        values = values[:0]
    for one in sequences:
        part, values = values[: _labels(one)], values[_labels(one) :]
        trainer = None
        if len(part) and one.ids is not None and one.mask is not None:
            trainer = np.full(len(one.ids), np.nan)
            trainer[np.flatnonzero(one.mask)[: len(part)]] = part
        yield replace(
            one,
            trainer=trainer,
            staleness=row.staleness,
            mean_entropy=row.mean_entropy if alone and len(part) == _labels(one) else None,
            prompt=row.prompt if alone else None,  # a row has one text for all sequences
            completion=row.completion if alone else None,
            misfits=(*one.misfits, *misfits),
        )
        misfits = ()


def _labels(one: Sample) -> int:
    return 0 if one.mask is None else int(one.mask.sum())


# ---- what is lost


def find_lost(paths: Iterable[Path], read: Iterable[Path]) -> tuple[str, ...]:
    """Say which records are not there. For a run, the ledger names the steps that should have them; a single file has
    bytes behind its last step."""
    runs = [path for path in paths if is_run(path)]
    of_runs = {file for run in runs for file in files_of(run)}
    others = [file for file in read if file.suffix == RECORDS and file not in of_runs]
    return tuple(text for text in (*map(_lost_steps, runs), *map(_lost_bytes, others)) if text)


def _lost_bytes(file: Path) -> str:
    end = max((block.end for block in records.blocks_in(file)), default=0)
    left = file.stat().st_size - end
    return f"{file}: its last {left:,} bytes hold no whole step" if left else ""


def _lost_steps(run: Path) -> str:
    whole = [file for file in files_of(run) if file.suffix == RECORDS]
    if not (run / records.FOLDER).is_dir():
        return ""
    begins = [int(found[1]) for file in whole if (found := re.fullmatch(r"from-(\d{1,18})", file.stem))]
    first = min(begins, default=0)  # records of earlier steps were removed
    wanted = [step for step in _steps_with_records(run) if step >= first]
    there = {block.step for file in whole for block in records.blocks_in(file)}
    if not (lost := [step for step in wanted if step not in there]):
        return ""
    return f"{run}: the records of {len(lost):,} of {len(wanted):,} steps are lost: {_ranges(lost)}"


def _steps_with_records(run: Path) -> list[int]:
    """Return the steps whose documents have digests in the ledger, as with `documents: all`. A further update on the
    same documents has no records of its own."""
    steps: dict[int, bool] = {}
    before: Any = None
    with (run / LEDGER).open("rb") as file:
        for content, _ in bounded.read_lines(file):
            try:
                line = bounded.load_json(content or b"", scale=4)
            except ValueError:  # the last line, cut off by a kill
                continue
            if isinstance(line, dict) and type(line.get("step")) is int and line.get("documents"):
                steps[line["step"]] = bool(line.get("digests")) and line["documents"] != before
                before = line["documents"]
    return sorted(step for step, kept in steps.items() if kept)


def _ranges(steps: Sequence[int]) -> str:
    """Return sorted steps as text. Example: `1, 3 to 5`."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in found[:_MOST_RANGES]]
    return ", ".join(shown) + (f" and {len(found) - _MOST_RANGES} more ranges" if len(found) > _MOST_RANGES else "")
