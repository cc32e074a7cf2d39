"""Reads the directory of a run. Any file may be missing or cut off: what is there is read, what is not is noted."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from truestep.report.series import Point

Record = dict[str, Any]
LARGEST_VALUE = 1e300


@dataclass
class Run:
    """What the directory of a run holds."""

    name: str
    path: Path
    metrics: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    ledger: list[Record] = field(default_factory=list)
    rejected: list[Record] = field(default_factory=list)
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # What is missing or unreadable, a sentence each.
    problems: list[str] = field(default_factory=list)
    # Documents seen once each step is done, as far as anything says.
    documents_at: dict[float, float] = field(default_factory=dict)

    def option(self, section: str, name: str) -> Any:
        """As the run's configuration has it; None where that says nothing."""
        inside = self.config.get(section)
        return inside.get(name) if isinstance(inside, dict) else None

    def points(self, key: str) -> list[Point]:
        """The series of a metric. A line without the key is passed over, one without a finite value is a gap."""
        return self._points(self.metrics, key)

    def evaluation_points(self, key: str) -> list[Point]:
        return self._points(self.evaluations, key)

    def _points(self, records: Sequence[Record], key: str) -> list[Point]:
        result = []
        for record in records:
            if key in record:
                value = number(record, key)
                step = step_of(record)
                documents = number(record, "documents_seen")
                documents = documents if is_finite(documents) else self.documents_at.get(step)
                result.append(Point(step, documents, value if is_finite(value) else None))
        return result

    def values(self, key: str) -> list[float]:
        """The finite values of a metric."""
        return [point.value for point in self.points(key) if point.value is not None]

    def last(self, key: str) -> float | None:
        """The value on the last line that has the metric, NaN included: a run that ends in NaN must not hide it."""
        for record in reversed(self.metrics):
            if key in record:
                value = number(record, key)
                return math.nan if value is None else value
        return None

    @property
    def steps(self) -> int:
        return len(self.metrics)

    @property
    def documents(self) -> float | None:
        return max(self.documents_at.values(), default=None)


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def number(record: Mapping[str, Any], key: str) -> float | None:
    """The number under `key`, None for anything that is no number."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A value this large is an overflow, and a sum over it would be one.
    if abs(value) > LARGEST_VALUE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def step_of(record: Mapping[str, Any]) -> float:
    """The step of a record; those without one are left out on reading."""
    step = number(record, "step")
    return step if is_finite(step) else math.nan


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Reads every run, under names that tell them apart."""
    paths = [Path(path) for path in paths]
    return [read_run(path, name) for path, name in zip(paths, run_names(paths), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """The directory's name, with its parent's where two are the same, with a number where that is no help."""
    resolved = [path.resolve() for path in paths]
    names = [path.name or str(path) for path in resolved]
    longer = [f"{path.parent.name}/{path.name}" for path in resolved]
    names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return [
        f"{name} ({names[: index + 1].count(name)})" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def read_run(path: Path, name: str | None = None) -> Run:
    path = Path(path)
    run = Run(name=name or path.resolve().name, path=path)
    if not path.is_dir():
        run.problems.append(f"The directory {path} does not exist.")
        return run
    _read_config(run)
    run.metrics = _one_per_step(run, "metrics.jsonl", "no training metrics")
    # A run that was asked for no evaluation lacks none.
    asked = not run.config or run.config.get("evaluation") is not None
    run.evaluations = _one_per_step(run, "evaluation.jsonl", "no held-out reward" if asked else None)
    # The ledger keeps its repeated steps: a document trained twice is what it is there to show.
    run.ledger = _read_lines(run, "ledger.jsonl", "documents trained twice cannot be found")
    # A run that rejected nothing has no such file.
    run.rejected = _read_lines(run, "rejected.jsonl", None)
    run.documents_at = _documents_at(run)
    if run.metrics and not run.documents_at:
        run.problems.append("No file says how many documents were seen: the run is drawn over steps only.")
    return run


def _read_text(path: Path) -> str:
    # The last character of a file that is being written may be cut off.
    return path.read_text(encoding="utf-8", errors="replace")


def _read_lines(run: Run, file: str, without: str | None) -> list[Record]:
    try:
        lines = _read_text(run.path / file).split("\n")
    except FileNotFoundError:
        if without:
            run.problems.append(f"{file} is missing: {without}.")
        return []
    except OSError as error:
        run.problems.append(f"{file} cannot be read ({error.strerror or error}).")
        return []
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
    """The records in the order of their steps. A run resumed from a checkpoint repeats steps: the later counts."""
    records = _read_lines(run, file, without)
    with_step = [record for record in records if is_finite(number(record, "step"))]
    if len(with_step) < len(records):
        run.problems.append(f"{file}: {len(records) - len(with_step):,} lines without a step were left out.")
    by_step = {step_of(record): record for record in with_step}
    if len(by_step) < len(with_step):
        run.problems.append(
            f"{file}: {len(with_step) - len(by_step):,} lines repeat a step (a resumed run?); the later one is shown."
        )
    return [by_step[step] for step in sorted(by_step)]


def _read_config(run: Run) -> None:
    try:
        run.config_text = _read_text(run.path / "config.yaml")
        config = yaml.safe_load(run.config_text)
    except FileNotFoundError:
        run.problems.append("config.yaml is missing.")
        return
    except OSError as error:
        run.problems.append(f"config.yaml cannot be read ({error.strerror or error}).")
        return
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
    """Documents seen by step: what the files say, else the sum of the documents of each step."""
    result: dict[float, float] = {}
    for records in (run.ledger, run.metrics, run.evaluations):
        result |= dict(_pairs(records, "documents_seen"))
    if not any(value > 0 for value in result.values()):
        total = 0.0
        for step, documents in _pairs(run.metrics, "num_documents"):
            total += documents
            result[step] = total
        if total <= 0:
            return {}
        # The evaluation before training has seen none.
        result.setdefault(0.0, 0.0)
    return result


def _pairs(records: Iterable[Record], key: str) -> Iterable[tuple[float, float]]:
    for record in records:
        step = number(record, "step")
        value = number(record, key)
        if is_finite(step) and is_finite(value):
            yield step, value
