"""The sinks of a run's numbers: metrics.jsonl, Weights & Biases, TensorBoard."""

import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from truestep.errors import TruestepError
from truestep.files import append_json_line, write_whole
from truestep.text import printable

# The columns of a tracker's table of rollouts.
SAMPLE_COLUMNS = (
    *("step", "group_id", "prompt", "completion", "reward", "advantage", "length", "truncated", "log_ratio"),
    "rejected",
)


class SinkError(TruestepError):
    pass


class Sink(Protocol):
    """A place that a run's numbers go to: each step's line, each evaluation's, and the end."""

    def step(self, line: Mapping[str, Any]) -> None: ...

    def evaluation(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ShowsRollouts(Protocol):
    """A sink that shows kept rollouts too."""

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Show rollouts of the step whose line is given."""
        ...


class JsonLines:
    def __init__(self, path: Path):
        self._path = path

    def step(self, line: Mapping[str, Any]) -> None:
        append_json_line(self._path, line)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """The run's directory keeps evaluations itself, in a file of their own."""

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files for TensorBoard, which shows nothing that an earlier start wrote of steps after `done`."""

    def __init__(self, directory: str, done: int = 0):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SinkError("logging.tensorboard needs `pip install 'truestep[tensorboard]'`") from error
        self._writer = SummaryWriter(directory, purge_step=done + 1)

    def step(self, line: Mapping[str, Any]) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        for name, value in _numbers(line).items():
            self._writer.add_scalar(f"evaluation/{name}", value, line["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run at Weights & Biases, with documents_seen as its x-axis: two runs share that one.

    `options` are `project`, `name` and `mode` of wandb.init. Every `samples_every` steps it gets a table of rollouts.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], samples_every: int = 0, **options: Any):
        try:
            import wandb
        except ImportError as error:
            raise SinkError("logging.wandb needs `pip install 'truestep[wandb]'`") from error
        # One run on the server for all starts of this one.
        id_file = directory / "wandb_id"
        run_id = _run_id(id_file)
        try:
            with _no_arguments():
                self._run = wandb.init(dir=str(directory), config=dict(config), id=run_id, resume="allow", **options)
        except wandb.Error as error:
            raise SinkError(f"logging.wandb: {printable(error)}") from error
        write_whole(id_file, run_id.encode())
        self._run.define_metric("*", step_metric="documents_seen")
        self._samples_every, self._table = samples_every, wandb.Table

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log(_numbers(line))

    def evaluation(self, line: Mapping[str, Any]) -> None:
        renamed = {f"evaluation/{name}": value for name, value in _numbers(line).items() if name != "documents_seen"}
        self._run.log(renamed | {"documents_seen": line["documents_seen"]})

    def rollouts(self, line: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        every = self._samples_every
        if rows and every and (line["step"] == 1 or line["step"] % every == 0):
            data = [[row.get(name) for name in SAMPLE_COLUMNS] for row in rows]
            table = self._table(columns=list(SAMPLE_COLUMNS), data=data)
            self._run.log({"rollouts": table, "documents_seen": line["documents_seen"]})

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hide the command line, which wandb would copy: an address given there may hold a password.

    Nothing is lost, since what the arguments say is in the configuration, without its secrets.
    """
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept


def _run_id(file: Path) -> str:
    """Read the run's id at Weights & Biases; a new one where there is none, or a damaged one."""
    if file.is_file():
        found = file.read_bytes()[:100].decode("ascii", errors="replace").strip()
        if re.fullmatch(r"[\w-]{1,64}", found, re.ASCII):
            return found
    return uuid.uuid4().hex[:12]


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if isinstance(value, int | float)}
