"""Reads the directory of a run. If a file is missing, damaged or cut off, the other data is read and the problem is
noted.

Each file is read once, line by line, into compact tables.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import yaml

from truestep.files.whole import scan_lines
from truestep.report.series import Series
from truestep.report.tables import Reasons, Repeats, Table, finite, first_of, number
from truestep.text import printable, redacted

Record = dict[str, Any]
MOST_WARNINGS = 1000  # the largest number of warnings that are read
MOST_GENERATIONS = 10_000  # the largest number of generations that are read
LONGEST_CONFIG = 200_000  # the largest number of characters of config.yaml that are shown
__all__ = ["Record", "Run", "finite", "is_finite", "number", "read_run", "read_runs", "run_names"]


@dataclass
class Ledger:
    """The contents of the ledger: which documents it repeats, and the number of documents of each step."""

    path: Path
    repeats: Repeats = field(default_factory=Repeats)
    # By step: the line's num_documents ("stated"), and the length of its list of documents ("listed").
    sizes: Table = field(default_factory=Table)

    def repeated(self, allowed: int) -> tuple[int, int, int, list[str]]:
        """Return the number of distinct documents, the number of documents that occur more than `allowed` times, the
        largest number of occurrences, and three names of repeated documents."""
        distinct, repeated, largest, wanted = self.repeats.count(allowed)
        documents = (document for line in scan_lines(self.path, lenient=True) for document in _documents(line.value))
        # The file is read a second time for the names, but only if documents occur too often.
        return distinct, repeated, largest, first_of(documents, wanted, 3) if wanted else []


@dataclass
class Run:
    """The contents of a run's directory."""

    name: str
    path: Path
    metrics: Table = field(default_factory=Table)
    evaluations: Table = field(default_factory=Table)
    # The first and the last evaluation with examples; they may be the same.
    examples: list[Record] = field(default_factory=list)
    ledger: Ledger = field(default_factory=lambda: Ledger(Path()))
    rejected: Reasons = field(default_factory=Reasons)
    warnings: list[Record] = field(default_factory=list)  # the lines of warnings.jsonl
    generations: list[Record] = field(default_factory=list)  # the lines of generations.jsonl
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # A sentence for each file that is missing or unreadable.
    problems: list[str] = field(default_factory=list)
    # The documents seen after each step, for the steps for which a file has the number.
    documents_at: dict[float, float] = field(default_factory=dict)
    # A cache of `documents_seen`, by the id of the table.
    _seen: dict[int, np.ndarray] = field(default_factory=dict)

    def option(self, section: str, name: str) -> Any:
        """Return an option of the run's configuration; None if it is not set."""
        inside = self.config.get(section)
        return inside.get(name) if isinstance(inside, dict) else None

    def points(self, key: str) -> Series:
        """Return the series of a metric. Lines without the key are left out; a value that is not finite is a gap."""
        return self._points(self.metrics, key)

    def evaluation_points(self, key: str) -> Series:
        return self._points(self.evaluations, key)

    def _points(self, table: Table, key: str) -> Series:
        places, values = table.column(key)
        seen = self.documents_seen(table)[places]
        return Series(table.steps[places], seen, np.where(np.isfinite(values), values, np.nan))

    def documents_seen(self, table: Table) -> np.ndarray:
        """Return the documents seen at each record of a table; NaN if unknown."""
        if id(table) not in self._seen:
            self._seen[id(table)] = self._find_documents_seen(table)
        return self._seen[id(table)]

    def seconds_by(self, table: Table) -> np.ndarray:
        """Return the total seconds of steps, evaluations and saves up to each record of a table; NaN if unknown."""
        spent = np.zeros(len(self.metrics))
        for key in ("step_time", "time/evaluation", "time/save"):
            places, values = self.metrics.column(key)
            spent[places] += np.where(np.isfinite(values) & (values > 0), values, 0.0)
        if not spent.any():
            return np.full(len(table), np.nan)
        reached = np.searchsorted(self.metrics.steps, table.steps, side="right")
        return np.append(0.0, np.cumsum(spent))[reached]

    def _find_documents_seen(self, table: Table) -> np.ndarray:
        seen = np.full(len(table), np.nan)
        rows, documents = table.column("documents_seen")
        seen[rows] = np.where(np.isfinite(documents), documents, np.nan)
        for index in np.flatnonzero(np.isnan(seen)).tolist():
            seen[index] = self.documents_at.get(float(table.steps[index]), math.nan)
        return seen

    def by_step(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and the values of a metric, where it is finite."""
        return finite_column(self.metrics, key)

    def values(self, key: str) -> list[float]:
        values: list[float] = self.by_step(key)[1].tolist()
        return values

    def last(self, key: str) -> float | None:
        """Return the last value of a metric, even if it is NaN."""
        _, values = self.metrics.column(key)
        return float(values[-1]) if len(values) else None


def finite_column(table: Table, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of those records of a table whose value is finite."""
    places, values = table.column(key)
    there = np.isfinite(values)
    return table.steps[places[there]], values[there]


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all runs, and give them distinct names."""
    return [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Name runs by their directories. Runs with equal names get the parent directory's name in front, or else a
    number."""
    resolved = [Path(os.path.realpath(path)) for path in paths]
    names = [path.name or str(path) for path in resolved]
    longer = [f"{path.parent.name}/{path.name}" for path in resolved]
    names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def read_run(path: Path, name: str | None = None) -> Run:
    run = Run(name=name or os.path.basename(os.path.realpath(path)), path=path)
    if not path.is_dir():
        run.problems.append(f"The directory {path} does not exist.")
        return run
    _read_config(run)
    run.metrics = _one_per_step(run, "metrics.jsonl", "no training metrics")
    # A missing evaluation.jsonl is a problem only if the configuration has an evaluation.
    asked = not run.config or run.config.get("evaluation") is not None
    run.evaluations = _one_per_step(run, "evaluation.jsonl", "no held-out reward" if asked else None, examples=True)
    seen = _read_ledger(run)
    # A run that rejected no records has no such file.
    for record in _read_lines(run, "rejected.jsonl", None):
        run.rejected.add(record.get("reason", "no reason given"))
    run.warnings = list(islice(_read_lines(run, "warnings.jsonl", None), MOST_WARNINGS))
    run.generations = list(islice(_read_lines(run, "generations.jsonl", None), MOST_GENERATIONS))
    run.documents_at = _documents_at(run, seen)
    if len(run.metrics) and not run.documents_at:
        run.problems.append("No file says how many documents were seen: the run is drawn over steps only.")
    return run


def _documents(record: Record | None) -> list[Any]:
    documents = None if record is None else record.get("documents")
    return documents if isinstance(documents, list) else []


def _read_ledger(run: Run) -> dict[float, float]:
    """Read the ledger, and return the documents seen after each step. Lines that repeat a step are counted too, so that
    a document that was trained twice is found."""
    run.ledger = Ledger(run.path / "ledger.jsonl")
    seen: dict[float, float] = {}
    for record in _read_lines(run, "ledger.jsonl", "documents trained twice cannot be found"):
        documents = _documents(record)
        run.ledger.repeats.add(documents)
        if (step := finite(record, "step")) is not None:
            run.ledger.sizes.add({"stated": record.get("num_documents"), "listed": len(documents)}, step)
            if (after := finite(record, "documents_seen")) is not None:
                seen[step] = after
    run.ledger.sizes.finish()
    return seen


def _read_text(run: Run, file: str) -> str | None:
    """Read a file, or note why it cannot be read."""
    try:
        with (run.path / file).open(encoding="utf-8", errors="replace") as stream:
            text = stream.read(LONGEST_CONFIG + 1)
    except FileNotFoundError:
        run.problems.append(f"{file} is missing.")
        return None
    except OSError as error:
        run.problems.append(f"{file} cannot be read ({error.strerror or error}).")
        return None
    if len(text) > LONGEST_CONFIG:
        run.problems.append(f"{file} is longer than {LONGEST_CONFIG:,} characters: its beginning is shown.")
    return text[:LONGEST_CONFIG]


def _read_lines(run: Run, file: str, without: str | None) -> Iterator[Record]:
    """Yield the objects of a file, and note its damage. `without` says what information is lost if the file is missing
    or empty; None if that is not a problem."""
    count = bad = 0
    first, cut = "", False
    try:
        if without is not None and not (run.path / file).exists():
            run.problems.append(f"{file} is missing{f': {without}' if without else ''}.")
        for line in scan_lines(run.path / file, lenient=True):
            if line.value is not None:
                count += 1
                yield line.value
            elif not line.whole:
                cut = True
            else:
                bad += 1
                first = first or f"line {line.number}, byte {line.start}: {printable(line.damage, 120)}"
    except OSError as error:
        run.problems.append(f"{file} cannot be read ({error.strerror or error}).")
        return
    if cut:
        run.problems.append(f"{file}: the last line is cut off and was left out.")
    if bad:
        lines_are = "line is" if bad == 1 else "lines are"
        run.problems.append(f"{file}: {bad:,} {lines_are} no JSON object and left out ({first}).")
    if not count and not cut and not bad and without and (run.path / file).exists():
        run.problems.append(f"{file} is empty: {without}.")


def _one_per_step(run: Run, file: str, without: str | None, *, examples: bool = False) -> Table:
    """Read a file into a table by step. If a resumed run wrote a step again, the later line replaces the
    earlier one."""
    table, left_out = Table(), 0
    for record in _read_lines(run, file, without):
        step = finite(record, "step")
        if step is None:
            left_out += 1
            continue
        table.add(record, step)
        if examples and isinstance(record.get("examples"), list):
            _keep_examples(run, record, step)
    table.finish()
    if left_out:
        run.problems.append(f"{file}: {left_out:,} lines without a step were left out.")
    if table.repeated:
        run.problems.append(f"{file}: {table.repeated:,} lines repeat a step (a resumed run?); the later one is shown.")
    if table.left_out:
        run.problems.append(f"{file}: it names more than {len(table.names):,} metrics; the others were left out.")
    return table


def _keep_examples(run: Run, record: Record, step: float) -> None:
    if not run.examples:
        run.examples = [record, record]
    if step <= (finite(run.examples[0], "step") or 0.0):
        run.examples[0] = record
    if step >= (finite(run.examples[1], "step") or 0.0):
        run.examples[1] = record


def _read_config(run: Run) -> None:
    text = _read_text(run, "config.yaml")
    if text is None:
        return
    run.config_text = redacted(text)
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError, LookupError):
        run.problems.append("config.yaml is no valid YAML; its text is shown as it is.")
        return
    if isinstance(config, dict):
        run.config = config
        for key in ("versions", "version"):
            found = config.get(key)
            if isinstance(found, dict):
                run.versions |= {
                    printable(name, 60): printable(value, 60) for name, value in found.items() if value is not None
                }
            elif isinstance(found, str | int | float):
                run.versions["truestep"] = printable(found, 60)


def _documents_at(run: Run, ledger: dict[float, float]) -> dict[float, float]:
    """Return the documents seen by each step: documents_seen from the files, or else the running sum of
    num_documents."""
    result = dict(ledger)
    for table in (run.metrics, run.evaluations):
        places, documents = table.column("documents_seen")
        there = np.isfinite(documents)
        result |= dict(zip(table.steps[places[there]].tolist(), documents[there].tolist(), strict=True))
    if not any(value > 0 for value in result.values()):
        steps, counts = (found.tolist() for found in run.by_step("num_documents"))
        result |= dict(zip(steps, accumulate(counts), strict=True))
        if sum(counts) <= 0:
            return {}
        # Step 0 is the evaluation before training.
        result.setdefault(0.0, 0.0)
    return result
