"""The sinks of a run's numbers: metrics.jsonl, the console, Weights & Biases, TensorBoard."""

import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from truestep.errors import TruestepError
from truestep.files import append_json_line, write_whole
from truestep.text import printable

# The numbers that matter while watching, in order, with how to show them.
_LIVE = {
    "reward": "reward {:.3f}",
    "loss": "loss {:+.4f}",
    "new_logprobs": "logπ {:.3f}",
    "ratio_new_old": "ratio {:.4f}",
    "clipped_ratio_fraction": "clipped {:.1%}",
    "grad_norm": "grad {:.3g}",
    "tokens_per_second": "{:,.0f} tok/s",
}

_RATIO_TOLERANCE = 1e-3
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


def live_line(line: Mapping[str, Any], width: int | None = None) -> str:
    """Format as many of the numbers as fit, the most telling first."""
    shown = ""
    for name, form in _LIVE.items():
        if line.get(name) is not None:
            longer = f"{shown}  {form.format(line[name])}".lstrip()
            if width is not None and len(longer) > width:
                break
            shown = longer
    return shown


class ConsoleSink:
    """A bar with a live line on a terminal; elsewhere, one plain line for each step."""

    def __init__(self, console: Console, *, steps: int | None, done: int = 0, title: str = "training"):
        self._console, self._steps, self._live = console, steps, console.is_terminal
        counter = f"{steps or ''}/{steps}" if steps else "0000000"
        # A narrow terminal goes without the time, and a narrower one without the bar.
        room = console.width - len(title) - len(counter) - 5
        wide, wider = room > 80, room > 104
        self._numbers_width = room - 18 * wide - 24 * wider
        unwrapped = Column(no_wrap=True)
        columns: list[ProgressColumn] = [TextColumn("[bold]{task.description}", table_column=unwrapped)]
        if wide:
            columns.append(BarColumn(bar_width=16))
        columns.append(TextColumn("{task.completed:.0f}" + (f"/{steps}" if steps else ""), table_column=unwrapped))
        if wider:
            columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        columns.append(TextColumn("{task.fields[numbers]}", style="cyan", table_column=unwrapped))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(title, total=steps, completed=done, numbers="")
        if self._live:
            self._progress.start()

    def step(self, line: Mapping[str, Any]) -> None:
        if self._live:
            numbers = live_line(line, self._numbers_width)
            self._progress.update(self._task, completed=line["step"], numbers=numbers)
        else:
            total = f"/{self._steps}" if self._steps else ""
            self._console.print(f"step {line['step']}{total}  {live_line(line)}", highlight=False, soft_wrap=True)
        ratio = line.get("ratio_new_old")
        if line["step"] == 1 and ratio is not None and not abs(ratio - 1) <= _RATIO_TOLERANCE:
            self._console.print(
                f"[bold yellow]warning:[/] ratio_new_old is {ratio:.4f} at step 1, where the policy is still the "
                "sampler's: they do not give the same probabilities (temperature, head precision, other weights, or "
                "rollouts of an older policy)",
                highlight=False,
                soft_wrap=True,
            )

    def evaluation(self, line: Mapping[str, Any]) -> None:
        if "loss" in line:
            text = f"held-out after step {line['step']}: loss {line['loss']:.4f} over {line['num_labels']} labels"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        rewards = ", ".join(
            f"{kind} " + ("none could be rated" if reward is None else f"{reward:.3f}")
            for kind, reward in (("greedy", line["greedy_reward"]), ("sampled", line["sampled_reward"]))
        )
        text = f"held-out after step {line['step']}: {rewards} over {line['num_prompts']} prompts"
        if line["num_unrated"]:
            text += f"; {line['num_unrated']} completions have no reward: "
            text += "; ".join(printable(problem) for problem in line.get("problems", []))
        self._console.print(printable(text, 2000), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


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
