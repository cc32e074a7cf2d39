"""The sinks of a run's metrics: metrics.jsonl, Weights & Biases, TensorBoard, trackio."""

import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from truestep.errors import TruestepError
from truestep.files.whole import append_json_line, write_whole
from truestep.metrics.observers import Observer
from truestep.text import printable
from truestep.types import Rejected

# The columns of a tracker's table of rollouts.
SAMPLE_COLUMNS = (
    *("step", "group_id", "prompt", "completion", "reward", "advantage", "length", "truncated", "log_ratio"),
    "rejected",
)
# Additional columns if documents have turns.
EPISODE_COLUMNS = ("ended_by", "conversation")


class SinkError(TruestepError):
    pass


class Sink(Protocol):
    """A destination of a run's metrics: the lines of steps and of evaluations."""

    def step(self, line: Mapping[str, Any]) -> None: ...

    def evaluation(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsRollouts(Protocol):
    """A sink that also shows kept rollouts."""

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Show the kept rollouts, `rows`, of the step with this line."""
        ...


@runtime_checkable
class HearsOfRejected(Protocol):
    """A sink that receives the reasons of rejected records."""

    def rejected(self, reasons: Iterable[str]) -> None: ...


class Sinks(Observer):
    """The sinks of a run as one observer. The function `kept` returns the current step's kept rollouts as rows."""

    def __init__(self, sinks: Sequence[Sink] = (), kept: Callable[[], Sequence[Mapping[str, Any]]] = tuple):
        self.sinks = list(sinks)
        self._kept = kept

    def rejected(self, records: Sequence[Rejected]) -> None:
        for sink in self.sinks:
            if isinstance(sink, HearsOfRejected):
                sink.rejected(record.reason for record in records)

    def step(self, line: Mapping[str, Any]) -> None:
        kept = self._kept()
        for sink in self.sinks:
            sink.step(line)
            if kept and isinstance(sink, ShowsRollouts):
                sink.rollouts(line, kept)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        for sink in self.sinks:
            sink.evaluation(line)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


class Samples:
    """Chooses the steps whose rollouts a tracker shows: step 1 and every `every`-th step. With 0, no step."""

    def __init__(self, every: int):
        self._every = every

    def of(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and the rows of a table; no rows if this step is not shown."""
        if not self._every or (line["step"] != 1 and line["step"] % self._every):
            return list(SAMPLE_COLUMNS), []
        conversations = any(row.get("turns") for row in rows)
        columns = [*SAMPLE_COLUMNS, *(EPISODE_COLUMNS if conversations else ())]
        return columns, [[_sampled(row, name) for name in columns] for row in rows]


def _sampled(row: Mapping[str, Any], name: str) -> Any:
    return transcript(row.get("turns") or ()) if name == "conversation" else row.get(name)


def transcript(blocks: Iterable[Mapping[str, Any]]) -> str:
    """Return the blocks of a kept conversation as one text. Each turn has a heading, and so has each sequence after the
    first."""
    lines, sequence = [], 0
    for block in blocks:
        if block["sequence"] != sequence:
            sequence = block["sequence"]
            lines.append(f"--- sequence {sequence + 1} ---")
        if block.get("role") is not None:
            lines.append(f"[{block['role']}]")
        lines.append(block["text"])
    return "\n".join(lines)


class JsonLines:
    def __init__(self, path: Path, fence: Callable[[], None] = lambda: None):
        """`fence` raises if another process writes the run."""
        self._path, self._fence = path, fence

    def step(self, line: Mapping[str, Any]) -> None:
        self._fence()
        append_json_line(self._path, line)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Do nothing: `RunDirectory` writes evaluation.jsonl."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files for TensorBoard. It hides steps later than `done`, which an earlier start of the run wrote."""

    def __init__(self, directory: str, done: int = 0, samples_every: int = 10):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SinkError("logging.tensorboard needs `pip install 'truestep[tensorboard]'`") from error
        self._writer = SummaryWriter(directory, purge_step=done + 1)
        self._samples = Samples(samples_every)

    def step(self, line: Mapping[str, Any]) -> None:
        for name, value in numbers_of(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        for name, value in numbers_of(line).items():
            self._writer.add_scalar(f"evaluation/{name}", value, line["step"])

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        columns, table = self._samples.of(line, rows)
        if table:
            lines = [columns, ["---"] * len(columns), *(map(_cell, row) for row in table)]
            self._writer.add_text("rollouts", "\n".join(f"| {' | '.join(line)} |" for line in lines), line["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run at Weights & Biases, with documents_seen as x-axis, so that runs with other step sizes can be compared.

    `options` are `project`, `name` and `mode` of wandb.init. Every `samples_every` steps it logs a table of rollouts.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], samples_every: int = 0, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise SinkError("logging.wandb needs `pip install 'truestep[wandb]'`") from error
        # All starts of this run use the same run at the server.
        id_file = directory / "wandb_id"
        run_id = stored_name(id_file) or uuid.uuid4().hex[:12]
        try:
            with _no_arguments():
                self._run = wandb.init(dir=str(directory), config=dict(config), id=run_id, resume="allow", **options)
        except wandb.Error as error:
            hint = " Or keep the run on this machine: logging.wandb.mode: offline" if "API key" in str(error) else ""
            raise SinkError(f"logging.wandb: {printable(error)}{hint}") from error
        write_whole(id_file, run_id.encode())
        self._run.define_metric("*", step_metric="documents_seen")
        self._samples, self._table = Samples(samples_every), wandb.Table

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(line))

    def evaluation(self, line: Mapping[str, Any]) -> None:
        renamed = {f"evaluation/{name}": value for name, value in numbers_of(line).items() if name != "documents_seen"}
        self._run.log(renamed | {"documents_seen": line["documents_seen"]})

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = self._samples.of(line, rows)
        if data:
            table = self._table(columns=[*columns], data=data)
            self._run.log({"rollouts": table, "documents_seen": line["documents_seen"]})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """A run of trackio, on this machine or in a Space, with optimizer steps as x-axis."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        *,
        project: str,
        name: str | None = None,
        space: str | None = None,
        samples_every: int = 0,
    ):
        try:
            import trackio
        except ImportError as error:
            raise SinkError("logging.trackio needs `pip install 'truestep[trackio]'`") from error
        # trackio resumes a run by its name alone, so the name must be unique.
        name_file = directory / "trackio_name"
        known = stored_name(name_file)
        readable = re.sub(r"[^\w-]", "-", name or directory.name, flags=re.ASCII)[:64]
        unique = known or f"{readable}-{uuid.uuid4().hex[:6]}"
        try:
            self._run = trackio.init(
                project=project,
                name=unique,
                space_id=space,
                config=dict(config),
                resume="allow" if known else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        except Exception as error:  # errors of trackio, of the hub, and of an invalid project name
            raise SinkError(f"logging.trackio: {printable(error, 500)}") from error
        write_whole(name_file, unique.encode())
        self._samples, self._table = Samples(samples_every), trackio.Table

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(line), step=line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        numbers = {f"evaluation/{name}": value for name, value in numbers_of(line).items()}
        self._run.log(numbers, step=line["step"])

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = self._samples.of(line, rows)
        if data:
            self._run.log({"rollouts": self._table(columns=columns, data=data)}, step=line["step"])

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hide the command line from wandb, which would upload it. A URL on the command line may contain a password.

    The options of the command line are logged with the configuration, without secrets.
    """
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept


def stored_name(file: Path) -> str | None:
    """Read the run's name at a tracker from a file; None if the file is missing or damaged."""
    if not file.is_file():
        return None
    found = file.read_bytes()[:200].decode("ascii", errors="replace").strip()
    return found if re.fullmatch(r"[\w-]{1,128}", found, re.ASCII) else None


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line, by name."""
    return {name: value for name, value in line.items() if isinstance(value, int | float)}


def _cell(value: Any) -> str:
    """Format a value for a cell of a Markdown table."""
    return printable("" if value is None else str(value).replace("\n", " ⏎ "), 1000).replace("|", "\\|")
