"""The commands. Each reads its arguments, calls one function, and shows what went wrong in one message."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from truestep import __version__
from truestep.errors import TruestepError

_FREE_OPTIONS = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


class ConfigCommand(click.Command):
    """A command that takes CONFIG.yaml and overrides; its help ends with every option of the configuration."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from truestep.config.describe import render_options

        width = ctx.terminal_width or Console().width
        console = Console(width=width, color_system="auto" if sys.stdout.isatty() else None)
        with console.capture() as capture:
            console.print(render_options())
        formatter.write("\nEvery option of the configuration, as --section.option VALUE:\n\n")
        formatter.write(capture.get())


def _said_once(command: Callable[..., Any]) -> Callable[..., Any]:
    """A mistake that the user can mend is one message on standard error, and exit code 1."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except TruestepError as error:
            _complain(str(error))
        except OSError as error:
            if error.filename is None:
                raise
            # A file where a directory should be, no permission, a full disk.
            _complain(f"{error.filename}: {error.strerror}")
        except KeyboardInterrupt:
            sys.exit(130)

    return guarded


def _complain(message: str) -> NoReturn:
    from rich.markup import escape

    Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="truestep")
def main() -> None:
    """RL fine-tuning of language models in which every step is exactly the step you asked for."""


_config = click.argument("config", type=click.Path(path_type=Path))
_overrides = click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--section.option VALUE]...")


@main.command(cls=ConfigCommand, context_settings=_FREE_OPTIONS)
@_config
@_overrides
@_said_once
def train(config: Path, overrides: tuple[str, ...]) -> None:
    """Train as CONFIG says, from the run's last checkpoint if it has one."""
    from truestep.config.load import load_config

    options = load_config(config, overrides)
    from truestep.ranks.group import leave
    from truestep.train import train as run

    stopped_by = run(options, Console()).stopped_by
    leave()
    if stopped_by is not None:
        sys.exit(128 + stopped_by)


@main.command(cls=ConfigCommand, context_settings=_FREE_OPTIONS)
@_config
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Where the files are written.")
@click.option("--gradients", is_flag=True, help="Also the backward pass: gradients.safetensors and grad_norm.")
@_overrides
@_said_once
def score(config: Path, output: Path, gradients: bool, overrides: tuple[str, ...]) -> None:
    """Run all of data.path as one step, update nothing, and write what the step is made of."""
    from truestep.config.load import load_config

    options = load_config(config, overrides)
    from truestep.metrics.tables import step_table
    from truestep.ranks.group import leave
    from truestep.score import score as run

    result = run(options, output, gradients=gradients)
    leave()
    if int(os.environ.get("RANK", "0")):  # the first rank speaks
        return
    console = Console()
    console.print(step_table(result.step))
    console.print(f"written to {output}", highlight=False, markup=False, soft_wrap=True)


@main.command(cls=ConfigCommand, context_settings=_FREE_OPTIONS)
@_config
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Where the files are written.")
@click.option("--full", is_flag=True, help="The model and rollouts as they are, not reduced in size.")
@click.option(
    "--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="At most so many processes at a time."
)
@click.option(
    "--documents", type=click.IntRange(min=4), default=14, show_default=True, help="How many of the rollouts."
)
@_overrides
@_said_once
def verify(config: Path, output: Path, full: bool, ranks: int, documents: int, overrides: tuple[str, ...]) -> None:
    """Prove the numbers of CONFIG: the same steps under many layouts, each against a float64 reference."""
    from truestep.config.load import load_config

    options = load_config(config, overrides)
    from truestep.ranks import forks

    forks.begin()
    from truestep.files import finite_or_null, write_text_whole
    from truestep.verify import report
    from truestep.verify.judge import verify as run

    console = Console()
    with console.status("making the case") as status:
        verdicts = run(
            options,
            output,
            most_ranks=ranks,
            documents=documents,
            full=full,
            progress=lambda name: status.update(f"running: {name}"),
        )
    write_text_whole(output / "verify.json", json.dumps(finite_or_null(report.as_json(verdicts)), indent=2) + "\n")
    write_text_whole(output / "verify.svg", report.figure(verdicts))
    console.print(report.table(verdicts))
    failed = [verdict for verdict in verdicts if not verdict.passed]
    for verdict in failed:
        for complaint in report.complaints(verdict):
            console.print(f"{verdict.layout.name}: {complaint}", highlight=False, markup=False, soft_wrap=True)
    if failed:
        _complain(f"{len(failed)} of {len(verdicts)} layouts are out of bounds; written to {output}")
    console.print(
        f"all {len(verdicts)} layouts are within {report.BOUND:g} of float64; written to {output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@main.command(cls=ConfigCommand, context_settings=_FREE_OPTIONS)
@_config
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Where the files are written.")
@click.option("--documents", type=click.IntRange(min=1), default=64, show_default=True, help="How many rollouts.")
@click.option(
    "--older",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="An earlier version of the weights, to recognise stale ones by; a run's own checkpoints are tried anyway.",
)
@_overrides
@_said_once
def parity(config: Path, output: Path, documents: int, older: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """How far the sampler's log-probs are from the trainer's, and why: each cause is tried by switching only it."""
    from truestep.config.load import load_config

    options = load_config(config, overrides)
    from truestep.files import finite_or_null, write_text_whole
    from truestep.parity import report
    from truestep.parity.gap import parity as run

    console = Console()
    result = run(options, documents=documents, older=older)
    write_text_whole(output / "parity.json", json.dumps(finite_or_null(report.as_json(result)), indent=2) + "\n")
    write_text_whole(output / "parity.svg", report.figure(result))
    console.print(report.table(result))
    worst = result.worst
    console.print(
        f"worst: document {worst.document}, position {worst.position}, token {worst.token} {worst.text!r}: sampler "
        f"{worst.sampler:.4f}, trainer {worst.trainer:.4f}\n{result.verdict}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The Hugging Face directory to make.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="Of the written weights.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@_said_once
def export(source: Path, output: Path, dtype: str, trust_remote_code: bool) -> None:
    """Turn a checkpoint, or the last one of a run's directory SOURCE, into a Hugging Face directory."""
    from truestep.export import export as run

    checkpoint = run(source, output, dtype, trust_remote_code)
    Console().print(f"{checkpoint} -> {output} ({dtype})", highlight=False, markup=False, soft_wrap=True)


@main.group()
def data() -> None:
    """Look at rollouts."""


@data.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--model", type=click.Path(path_type=Path), help="A model directory: token ids are held against it.")
@click.option("--tokens-per-microbatch", type=click.IntRange(min=1), help="The longest document allowed.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Of records without their own.",
)
@_said_once
def check(files: tuple[str, ...], model: Path | None, tokens_per_microbatch: int | None, temperature: float) -> None:
    """Counts, lengths, groups and rejected records of rollout FILES, with the reasons."""
    from truestep.rollouts.check import check_files, render

    vocabulary_size = None if model is None else _vocabulary_size(model)
    summary = check_files(files, vocabulary_size, temperature, tokens_per_microbatch)
    Console().print(render(summary))


def _vocabulary_size(model: Path) -> int:
    import json

    try:
        return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise TruestepError(f"--model {model}: its config.json gives no vocab_size: {error}") from error


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--output", type=click.Path(path_type=Path), help="The page; by default report.html in the first run.")
@_said_once
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """A self-contained page of one run, or of several compared."""
    from truestep.report import write_report

    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise TruestepError(f"{run} is no run's directory: it has no metrics.jsonl")
    page = write_report(list(runs), output or runs[0] / "report.html")
    Console().print(f"{page}", highlight=False, markup=False, soft_wrap=True)


@main.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the model, the task and the sampling."
)
@_said_once
def demo(output: Path, seed: int) -> None:
    """A whole RL run on this machine: make a tiny model, warm it up, train it by GRPO, write the report."""
    from truestep.demo.run import run

    run(output, seed, Console())
