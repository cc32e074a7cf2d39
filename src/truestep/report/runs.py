"""Reads the directory of a run. Any file may be missing or cut off: the rest is read, and the fault noted."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from truestep.report.series import Point

Record = dict[str, Any]
LARGEST_VALUE = 1e300


@dataclass
class Run:
    """The contents of a run's directory."""

    name: str
    path: Path
    metrics: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    ledger: list[Record] = field(default_factory=list)
    rejected: list[Record] = field(default_factory=list)
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # A sentence for each file that is missing or unreadable.
    problems: list[str] = field(default_factory=list)
    # The documents seen once each step is done, as far as any file says.
    documents_at: dict[float, float] = field(default_factory=dict)

    def option(self, section: str, name: str) -> Any:
        """Look up an option of the run's configuration; None where that says nothing."""
        inside = self.config.get(section)
        return inside.get(name) if isinstance(inside, dict) else None

    def points(self, key: str) -> list[Point]:
        """Collect the series of a metric. A line without the key is left out, one without a finite value is a gap."""
        return self._points(self.metrics, key)

    def evaluation_points(self, key: str) -> list[Point]:
        return self._points(self.evaluations, key)

    def _points(self, records: Sequence[Record], key: str) -> list[Point]:
        result = []
        for record in records:
            if key in record:
                step, documents = step_of(record), finite(record, "documents_seen")
                if documents is None:
                    documents = self.documents_at.get(step)
                result.append(Point(step, documents, finite(record, key)))
        return result

    def by_step(self, key: str) -> dict[float, float]:
        """Collect the finite values of a metric by their steps."""
        return {point.step: point.value for point in self.points(key) if point.value is not None}

    def values(self, key: str) -> list[float]:
        return list(self.by_step(key).values())

    def last(self, key: str) -> float | None:
        """Find the value on the last line that has the metric; a run that ends in NaN must not hide it."""
        for record in reversed(self.metrics):
            if key in record:
                value = number(record, key)
                return math.nan if value is None else value
        return None


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def number(record: Mapping[str, Any], key: str) -> float | None:
    """Read the number under `key`; None for anything that is no number."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A value this large is an overflow, and a sum over it would be one.
    if abs(value) > LARGEST_VALUE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def finite(record: Mapping[str, Any], key: str) -> float | None:
    value = number(record, key)
    return value if is_finite(value) else None


def step_of(record: Mapping[str, Any]) -> float:
    """Read the step of a record; records without one are left out when files are read."""
    step = finite(record, "step")
    return math.nan if step is None else step


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read every run, under names that tell them apart."""
    return [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """Name runs by their directories, with the parent's name or else a number where two are the same."""
    resolved = [path.resolve() for path in paths]
    names = [path.name or str(path) for path in resolved]
    longer = [f"{path.parent.name}/{path.name}" for path in resolved]
    names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def read_run(path: Path, name: str | None = None) -> Run:
    run = Run(name=name or path.resolve().name, path=path)
    if not path.is_dir():
        run.problems.append(f"The directory {path} does not exist.")
        return run
    _read_config(run)
    run.metrics = _one_per_step(run, "metrics.jsonl", "no training metrics")
    # Only a run that was to be evaluated lacks an evaluation.
    asked = not run.config or run.config.get("evaluation") is not None
    run.evaluations = _one_per_step(run, "evaluation.jsonl", "no held-out reward" if asked else None)
    # The ledger keeps its repeated steps: it is there to show a document that was trained twice.
    run.ledger = _read_lines(run, "ledger.jsonl", "documents trained twice cannot be found")
    # A run that rejected nothing has no such file.
    run.rejected = _read_lines(run, "rejected.jsonl", None)
    run.documents_at = _documents_at(run)
    if run.metrics and not run.documents_at:
        run.problems.append("No file says how many documents were seen: the run is drawn over steps only.")
    return run


def _read_text(run: Run, file: str, without: str | None = "") -> str | None:
    """Read a file, or note why it cannot be read. `without`: the consequence where it is missing; None for none."""
    try:
        # The last character of a file that is being written may be cut off.
        return (run.path / file).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if without is not None:
            run.problems.append(f"{file} is missing{f': {without}' if without else ''}.")
    except OSError as error:
        run.problems.append(f"{file} cannot be read ({error.strerror or error}).")
    return None


def _read_lines(run: Run, file: str, without: str | None) -> list[Record]:
    text = _read_text(run, file, without)
    if text is None:
        return []
    lines = text.split("\n")
    records, bad, cut = [], 0, False
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif index == len(lines) - 1:
            cut = True
        else:
            bad += 1
    if cut:
        run.problems.append(f"{file}: the last line is cut off and was left out.")
    if bad:
        run.problems.append(f"{file}: {bad:,} {'line is' if bad == 1 else 'lines are'} no JSON object and left out.")
    if not records and not cut and not bad and without:
        run.problems.append(f"{file} is empty: {without}.")
    return records


def _one_per_step(run: Run, file: str, without: str | None) -> list[Record]:
    """Read records in the order of their steps. A run resumed from a checkpoint repeats steps: the later counts."""
    records = _read_lines(run, file, without)
    with_step = [record for record in records if finite(record, "step") is not None]
    if len(with_step) < len(records):
        run.problems.append(f"{file}: {len(records) - len(with_step):,} lines without a step were left out.")
    by_step = {step_of(record): record for record in with_step}
    if len(by_step) < len(with_step):
        run.problems.append(
            f"{file}: {len(with_step) - len(by_step):,} lines repeat a step (a resumed run?); the later one is shown."
        )
    return [by_step[step] for step in sorted(by_step)]


def _read_config(run: Run) -> None:
    run.config_text = _read_text(run, "config.yaml")
    try:
        config = yaml.safe_load(run.config_text or "")
    except (yaml.YAMLError, ValueError, RecursionError):
        run.problems.append("config.yaml is no valid YAML; its text is shown as it is.")
        return
    if isinstance(config, dict):
        run.config = config
        for key in ("versions", "version"):
            found = config.get(key)
            if isinstance(found, dict):
                run.versions |= {str(name): str(value) for name, value in found.items() if value is not None}
            elif isinstance(found, str | int | float):
                run.versions["truestep"] = str(found)


def _documents_at(run: Run) -> dict[float, float]:
    """Find the documents seen by each step: what the files say, else the sum over the steps so far."""
    result: dict[float, float] = {}
    for record in (*run.ledger, *run.metrics, *run.evaluations):
        step, documents = finite(record, "step"), finite(record, "documents_seen")
        if step is not None and documents is not None:
            result[step] = documents
    if not any(value > 0 for value in result.values()):
        counts = run.by_step("num_documents")
        result |= dict(zip(counts, accumulate(counts.values()), strict=True))
        if sum(counts.values()) <= 0:
            return {}
        # The evaluation before training has seen none.
        result.setdefault(0.0, 0.0)
    return result
