"""The command line. Each command parses its arguments, calls one function, and reports an error in one message."""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import click
from rich.console import Console

from truestep import __version__
from truestep.config.custom import keep_path_clean
from truestep.errors import TruestepError
from truestep.files.disks import no_file, refusal
from truestep.process.garbage import importing
from truestep.text import printable, shown

if TYPE_CHECKING:  # each command imports what it runs, so that `--help` does not load torch
    from rich.console import RenderableType

    from truestep.config.schema import Config
    from truestep.run.terminal.display import Display

_AUDIT_MODEL = "The model, or adapter, that sampled: 20,000 tokens are scored by it."
_FREE_OPTIONS = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


class ConfigCommand(click.Command):
    """A command that takes CONFIG.yaml and overrides. Its help ends with the options that matter; `--help WORD` shows
    those that match the word, and `--help-all` all."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--help-all" in args:
            self._tell_options(ctx, "all")
        asked = next((place for place, word in enumerate(args) if word in ctx.help_option_names), None)
        if asked is not None and len(args) > asked + 1:
            self._tell_options(ctx, args[asked + 1])
        return super().parse_args(ctx, args)

    def _tell_options(self, ctx: click.Context, about: str) -> NoReturn:
        from truestep.config.describe import render_options

        found = render_options(about)
        if found is None:
            _fail(f"no section and no option has {about!r} in its name; {ctx.command_path} --help names all sections")
        click.echo(_rendered(ctx, found))
        ctx.exit()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from truestep.config.describe import render_everyday

        formatter.write("\nThe options that matter, each with its default:\n\n")
        formatter.write(_rendered(ctx, render_everyday()))
        formatter.write(f"\n  {ctx.command_path} --help sampler   shows the options of a section\n")
        formatter.write(f"  {ctx.command_path} --help clip      the options with this word in their names\n")
        formatter.write(f"  {ctx.command_path} --help-all       all options\n")


def _rendered(ctx: click.Context, content: "RenderableType") -> str:
    width = ctx.terminal_width or Console().width
    console = Console(width=width, color_system="auto" if sys.stdout.isatty() else None)
    with console.capture() as capture:
        console.print(content)
    return capture.get()


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Report errors that the user can correct as one message on standard error, with exit code 1."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except TruestepError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            click.echo("stopped; the same command starts again", err=True)
            sys.exit(130)
        except Exception as error:
            file, number = getattr(error, "filename", None), refusal(error)
            if number is not None:  # raised by another library's write, for example to a full disk
                _fail(f"{file or 'a file or standard output'} cannot be written: {os.strerror(number)}")
            if not isinstance(error, OSError) or file is None:
                raise
            _fail(f"{file}: {error.strerror}")  # a file where a directory should be, no permission

    return guarded


def _fail(message: str, code: int = 1) -> NoReturn:
    from rich.text import Text

    from truestep.run.terminal.display import print_plain

    print_plain(Console(stderr=True), Text.assemble(("error:", "bold red"), " ", shown(message)))
    sys.exit(code)


def _print(text: str) -> None:
    """Print text without rich's markup, which paths and names might look like. It is not wrapped: it may have a command
    to copy."""
    Console().print(shown(text), highlight=False, markup=False, emoji=False, soft_wrap=True)


def _as_typed() -> list[str]:
    """Return the words of this command line, without the command's own options."""
    context = click.get_current_context()
    return ["truestep", context.info_name or "", str(context.params["config"]), *context.params["overrides"]]


def _display() -> "Display":
    """Return the display of a command's progress, which is silent except on the first rank."""
    from truestep.process import progress
    from truestep.run.terminal.display import Display

    progress.phase("starting")
    return Display(Console(stderr=True, quiet=bool(int(os.environ.get("RANK", "0")))))


class Commands(click.Group):
    """The group of all commands. Its help lists them by what they are for, and an unknown one is answered with its
    nearest."""

    groups: ClassVar = {
        "Begin": ("demo", "init", "convert"),
        "Train": ("plan", "train", "elastic-command", "export", "serve"),
        "Look at a run": ("report", "compare", "replay", "bisect"),
        "Check": ("data", "audit", "score", "verify", "parity"),
    }

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        room = formatter.width - width - 4
        for title, names in self.groups.items():
            rows = [(f"{name:<{width}}", self.commands[name].get_short_help_str(room)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        near = difflib.get_close_matches(args[0], self.commands, 1) if args[0] not in self.commands else []
        if near and not ctx.resilient_parsing:  # the shell completes a line that may have a mistake
            ctx.fail(f"no command {printable(args[0])!r}: did you mean {near[0]}?")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="truestep")
def main() -> None:
    """RL fine-tuning of language models in which every step is exactly the step you asked for."""
    click.get_current_context().call_on_close(keep_path_clean())


def _left_out(command: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides that remove the sampler and the evaluation if --data.path gives rollouts to score or verify."""
    named = any(word.partition("=")[0] == "--data.path" for word in overrides)
    if not named or command not in ("score", "verify"):
        return ()
    from truestep.config.schema import NOTHING_IS_DRAWN

    return tuple(word for name in NOTHING_IS_DRAWN for word in (f"--{name}", "null"))


def _config_command(command: Callable[..., None], short_help: str | None = None) -> click.Command:
    """Make a command of a function that takes a configuration, given on the command line as CONFIG and overrides."""

    @wraps(command)
    def with_config(config: Path, overrides: tuple[str, ...], **options: Any) -> None:
        from truestep.config.load import check_secrets, load_config

        try:
            loaded = load_config(config, (*overrides, *_left_out(command.__name__, overrides)))
            check_secrets(loaded, config)
        except Exception:
            if "TORCHELASTIC_RUN_ID" in os.environ:  # otherwise the launcher would restart it again and again
                from truestep.ranks.elastic import leave_after_error

                leave_after_error()
            raise
        command(loaded, **options)

    words = click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--section.option VALUE]...")
    file = click.argument("config", type=click.Path(path_type=Path))
    name = command.__name__.replace("_", "-")
    made = main.command(name=name, cls=ConfigCommand, context_settings=_FREE_OPTIONS, short_help=short_help)
    return made(file(words(_guarded(with_config))))


_output = click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory for the results.")


@_config_command
def train(config: "Config") -> None:
    """Train as CONFIG says, or go on with its run. A run with checkpoints continues from the last one."""
    with _display(), importing():
        from truestep.ranks.group import leave
        from truestep.run.notes import longer_by, what_next
        from truestep.run.terminal.display import is_terminal
        from truestep.run.train import train as run

    trainer = run(config, Console())
    stopped_by = trainer.stopped_by
    leave()
    if config.logging.console and trainer.ranks.first:
        longer = longer_by(config, trainer.step)
        best = trainer.checkpoints.best()
        console = Console()
        width = console.width if is_terminal(console) else None
        path, made = trainer.directory.path, trainer.step > 0
        for line in what_next(path, trainer.finished, longer, _as_typed(), best, width, made):
            click.echo(shown(line))  # not wrapped: commands are copied
    if stopped_by is not None:
        sys.exit(128 + stopped_by)


@partial(_config_command, short_help="Print the memory and time that a step needs.")
@click.option(
    "--ranks", "--gpus", type=click.IntRange(1), help="Number of GPUs. Default: as started by torchrun, or 1."
)
@click.option("--memory", type=click.FloatRange(0, min_open=True), help="GiB of each GPU. If too few: exit code 1.")
@click.option("--card", help="Plan for another GPU: a name (H200, H100, ...), or a file of its measured rates.")
@click.option("--hosts", type=click.IntRange(1), default=1, help="Number of machines. --gpus is then of each.")
@click.option("--network", type=click.FloatRange(0, min_open=True), help="GB/s that a GPU sends to other machines.")
@click.option("--length", type=click.FloatRange(1), help="Tokens in a document, for the predicted time.")
@click.option("--prompt", type=click.FloatRange(1), help="Tokens of it that its group shares: its prompt.")
@click.option("--group", type=click.IntRange(1), help="Documents of a group. Default: data.group_size.")
@click.option("--output", type=click.Path(path_type=Path), help="Directory to write plan.json to.")
def plan(
    config: "Config",
    ranks: int | None,
    memory: float | None,
    card: str | None,
    hosts: int,
    network: float | None,
    length: float | None,
    prompt: float | None,
    group: int | None,
    output: Path | None,
) -> None:
    """Print the memory that CONFIG needs, and the time of a step. It needs no GPU and reads no weights."""
    from truestep.plan.rates import named_rates, rates_of_plan
    from truestep.plan.report import hosts_of, make_plan_report, shared_prompt

    size = ranks or int(os.environ.get("WORLD_SIZE" if hosts == 1 else "LOCAL_WORLD_SIZE", "0" if hosts > 1 else "1"))
    if not size:
        raise click.UsageError("--hosts needs --gpus, the number of GPUs of each machine")
    several = hosts_of(hosts, size, network)
    if card:
        cards_memory, rates = named_rates(card)
        memory = memory or cards_memory
    else:
        rates, notes = rates_of_plan(size)
        memory = memory or (None if rates is None else rates.memory)
        for note in notes:
            _print(note)
    shared = shared_prompt(config, prompt, group)
    text, fits = make_plan_report(config, hosts * size, memory, output, rates, length, several, shared)
    _print(text)
    if not fits:
        sys.exit(1)


@partial(_config_command, short_help="Print each machine's command for an elastic run.")
@click.option("--hosts", required=True, help="The machines, with commas between them. The first has the rendezvous.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="GPUs of each machine.")
@click.option("--least", type=click.IntRange(1), help="The fewest agents to go on with. Default: half of them.")
@click.option("--port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="A port of the first.")
def elastic_command(config: "Config", hosts: str, gpus: int, least: int | None, port: int) -> None:
    """Print a command for each machine. The commands start a run that goes on when GPUs are lost or join
    (docs/machines.md)."""
    from truestep.tools.elastic_command import elastic_commands

    names = [name for name in hosts.split(",") if name]
    train = ["truestep", "train", *_as_typed()[2:]]
    for host, command in zip(names, elastic_commands(config, train, names, gpus, least, port), strict=True):
        click.echo(f"# {host}\n{command}")


@_config_command
@_output
@click.option("--gradients", is_flag=True, help="Run the backward pass too: gradients.safetensors and grad_norm.")
def score(config: "Config", output: Path, gradients: bool) -> None:
    """Write log-probs, ratios and metrics of rollouts. All of data.path is one step, without an update."""
    with _display():
        from truestep.metrics.tables import step_table
        from truestep.ranks.group import leave
        from truestep.tools.score import score as run

        result = run(config, output, gradients=gradients)
    leave()
    if int(os.environ.get("RANK", "0")):  # only the first rank prints
        return
    Console().print(step_table(result.step))
    _print(f"weights: {result.weights}; written to {output}")


@_config_command
@_output
@click.option("--full", is_flag=True, help="Use the model and the rollouts at full size. Default: reduced.")
@click.option("--ranks", type=click.IntRange(min=1), default=4, show_default=True, help="The most processes to use.")
@click.option(
    "--documents", type=click.IntRange(min=4), default=14, show_default=True, help="The number of rollouts to use."
)
def verify(config: "Config", output: Path, full: bool, ranks: int, documents: int) -> None:
    """Compare layouts with a float64 reference. The steps of CONFIG are run under each of them."""
    from truestep.ranks import forks

    forks.begin()
    console = Console()
    with _display():
        from truestep.files.whole import write_json, write_text_whole
        from truestep.tools.verify import report
        from truestep.tools.verify.judge import verify as run

        results = run(config, output, most_ranks=ranks, documents=documents, full=full)
    write_json(output / "verify.json", report.as_json(results))
    write_text_whole(output / "verify.svg", report.figure(results))
    console.print(report.table(results))
    failed = [result for result in results if not result.passed]
    for result in failed:
        for complaint in report.complaints(result):
            _print(f"{result.layout.name}: {complaint}")
    if failed:
        _fail(f"{len(failed)} of {len(results)} layouts are out of bounds; written to {output}")
    _print(f"all {len(results)} layouts are within {report.BOUND:g} of float64; written to {output}")


@_config_command
@_output
@click.option(
    "--documents", type=click.IntRange(min=1), default=64, show_default=True, help="The number of rollouts to use."
)
@click.option(
    "--older",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Earlier weights, to recognise stale ones. The run's own checkpoints are always tried.",
)
def parity(config: "Config", output: Path, documents: int, older: tuple[Path, ...]) -> None:
    """Compare the sampler's log-probs with the trainer's. Each possible cause of a difference is tested separately."""
    with _display():
        from truestep.files.whole import write_json, write_text_whole
        from truestep.tools.parity import report
        from truestep.tools.parity.gap import parity as run

        result = run(config, documents=documents, older=older)
    write_json(output / "parity.json", report.as_json(result))
    write_text_whole(output / "parity.svg", report.figure(result))
    Console().print(report.table(result))
    _print(f"weights: {result.weights}")
    worst = result.worst
    _print(
        f"worst: document {worst.document}, position {worst.position}, token {worst.token} {worst.text!r}: sampler "
        f"{worst.sampler:.4f}, trainer {worst.trainer:.4f}\n{result.verdict}"
    )


@partial(_config_command, short_help="Serve the policy to OpenAI's clients.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Other than loopback: with --key-env alone.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: one that is free.")
@click.option("--key-env", help="The environment variable with the secret that keys begin with: SECRET or SECRET:NAME.")
@click.option(
    "--documents",
    type=click.Path(path_type=Path),
    help="The file to which documents are appended, as records, when their rewards are posted.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A checkpoint to serve, in place of model.path.",
)
@click.option(
    "--tinker",
    type=click.Path(path_type=Path, file_okay=False),
    help="Serve the Tinker protocol too, with clients' checkpoints in this directory: docs/tinker.md.",
)
@click.option(
    "--tinker-keys",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --tinker: the file with a line NAME KEY [QUOTA=NUMBER ...] for each tenant. Without it any key is a "
    "tenant of its own.",
)
@click.option("--tinker-name", help="With --tinker: the base model's name, such as Qwen/Qwen3-8B.")
def serve(
    config: "Config",
    host: str,
    port: int,
    key_env: str | None,
    documents: Path | None,
    weights: Path | None,
    tinker: Path | None,
    tinker_keys: Path | None,
    tinker_name: str | None,
) -> None:
    """Serve the policy to OpenAI's clients (a key names a document: docs/agents.md). With --tinker, also serve clients
    that train adapters of it (docs/tinker.md)."""

    def ready(url: str) -> None:
        _print(f"{config.model.path} is served at {url}; Ctrl-C ends it")

    from truestep.tools.serve import serve as run

    beside = None
    if tinker is not None:
        from truestep.commands.tinker.serving import Tinker

        beside = Tinker(tinker, tinker_keys, tinker_name, say=_print)
    elif tinker_keys is not None or tinker_name is not None:
        raise click.UsageError("--tinker-keys and --tinker-name go with --tinker")
    keys = {"key_env": key_env, "documents": documents, "weights": weights}
    run(config, host=host, port=port, beside=beside, ready=ready, **keys)  # type: ignore[arg-type]


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="The Hugging Face directory to make.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="bfloat16",
    show_default=True,
    help="The dtype of the written weights.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@click.option(
    "--adapter", "adapter_alone", is_flag=True, help="Write the adapter alone, as peft does, instead of merging it."
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="The model that the adapter was trained on, if it has moved.",
)
@click.option("--best", is_flag=True, help="The run's best checkpoint, which its checkpoint.keep_best kept.")
@_guarded
def export(
    source: Path, output: Path, dtype: str, trust_remote_code: bool, adapter_alone: bool, model: Path | None, best: bool
) -> None:
    """Convert a checkpoint to a Hugging Face directory. SOURCE is a checkpoint, or a run's directory, whose last
    checkpoint is used. An adapter is merged into its model."""
    with _display():
        from truestep.tools.export import best_known
        from truestep.tools.export import export as run

        checkpoint = run(source, output, dtype, trust_remote_code, model=model, adapter_alone=adapter_alone, best=best)
    _print(f"{checkpoint} -> {output} ({dtype})")
    if best and (better := best_known(source).better_than(checkpoint)) is not None:
        _print(better)


@main.command(short_help="Convert another trainer's configuration.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="The file to write. Default: standard output.")
@_guarded
def convert(file: Path, output: Path | None) -> None:
    """Convert a configuration of verl, prime-rl, NeMo-RL, slime, OpenRLHF or TRL. FILE is YAML, TOML, or a script with
    --name value. Options without an equivalent become comments."""
    from truestep.config.convert import convert as run

    text, converted = run(file)
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        _fail(f"{output} exists: name another file")
    output.write_text(text, encoding="utf-8")
    _print(f"{output}: {converted.summary}")


@main.group()
def data() -> None:
    """Check rollout files before training (data check)."""


@data.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="A model directory, to check token ids and to tokenise chat messages.",
)
@click.option("--tokens-per-microbatch", type=click.IntRange(min=1), help="The longest document allowed, in tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="The temperature of records without one.",
)
@click.option("--group-size", type=click.IntRange(min=1), help="The run's data.group_size, to check groups against.")
@click.option("--fields", help="The run's data.fields, as YAML: '{my_weight: {level: label}}'.")
@_guarded
def check(
    files: tuple[str, ...],
    model: Path | None,
    tokens_per_microbatch: int | None,
    temperature: float,
    group_size: int | None,
    fields: str | None,
) -> None:
    """Show the contents of rollout FILES. It prints counts, lengths, groups, and the rejected records with reasons."""
    with _display():
        from truestep.rollouts.check import check_files, render

        vocabulary_size = None if model is None else _vocabulary_size(model)
        summary = check_files(
            files,
            vocabulary_size,
            temperature,
            tokens_per_microbatch,
            _chat_template(model),
            group_size,
            None if fields is None else _declared_fields(fields),
        )
    Console().print(render(summary))


def _declared_fields(text: str) -> dict[str, Any]:
    """Parse and check the fields that --fields declares."""
    import yaml
    from pydantic import ValidationError

    from truestep.config.sections import DataConfig

    try:
        found: dict[str, Any] = DataConfig.model_validate({"fields": yaml.safe_load(text)}).model_dump()["fields"]
    except yaml.YAMLError as error:
        raise TruestepError(f"--fields is not YAML: {printable(str(error))}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        raise TruestepError(f"--fields: {where}: {printable(first['msg'])}") from error
    return found


def _chat_template(model: Path | None) -> Any:
    """Return the chat template, which loads the model's tokenizer only when a record has messages."""
    from truestep.rollouts.chat import ChatTemplate

    def load() -> Any:
        from truestep.model.loading.read import load_tokenizer

        return None if model is None else load_tokenizer(model)

    return ChatTemplate(load, "data check needs --model to make tokens of messages" if model is None else None)


def _vocabulary_size(model: Path) -> int:
    from truestep.files.whole import LineError, exact_object

    if (kind := no_file(model / "config.json")) is not None:
        raise TruestepError(f"--model {model}: its config.json is {kind}, not a file")
    try:
        size = exact_object((model / "config.json").read_bytes()).get("vocab_size")
    except (OSError, LineError) as error:
        raise TruestepError(f"--model {model}: its config.json cannot be used: {error}") from error
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < 2**31:
        raise TruestepError(f"--model {model}: its config.json gives no vocab_size: it is {printable(size, 60)}")
    return size


@main.command(short_help="Find wrong tokens in any trainer's rollout dumps.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help=_AUDIT_MODEL)
@click.option(
    "--from",
    "source",
    type=click.Choice(["auto", "truestep", "trl", "verl", "prime-rl", "slime", "miles", "tinker", "openai"]),
    default="auto",
    show_default=True,
    help="The trainer that wrote the dumps; auto: as their fields say.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the findings to this HTML page.")
@_guarded
def audit(files: tuple[Path, ...], model: Path | None, source: str, output: Path | None) -> None:
    """Find wrong tokens in dumps of rollouts, and say what is wrong with each. FILES are dumps of this or another
    trainer, or directories of dumps. Exit code 1: a finding of high confidence; 2: input that cannot be read."""
    with _display():
        from truestep.files.whole import write_text_whole
        from truestep.tools.audit.opening import UnreadableError
        from truestep.tools.audit.report import page, render
        from truestep.tools.audit.run import audit as run

        try:
            result = run(files, model=model, source=source)
        except UnreadableError as error:
            _fail(str(error), 2)
    Console().print(render(result))
    if output is not None:
        _print(str(write_text_whole(output, page(result))))
    if not result.clean:
        sys.exit(1)


@main.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--output", type=click.Path(path_type=Path), help="The page; by default report.html in the first run.")
@_guarded
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write a run's page, or a comparison of several. The page is one self-contained HTML file."""
    from truestep.report import write_report

    for run in runs:
        if not (run / "metrics.jsonl").is_file():
            raise TruestepError(f"{run} is not a run's directory: it has no metrics.jsonl")
    _print(str(write_report(list(runs), output or runs[0] / "report.html")))


@main.command(context_settings=_FREE_OPTIONS, short_help="Make a step of RUN again, and compare the two.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--section.option VALUE]...")
@click.option("--step", type=click.IntRange(min=1), required=True, help="The step to make again.")
@click.option("--output", type=click.Path(path_type=Path), help="A new directory for the replay's own files.")
@_guarded
def replay(run: Path, overrides: tuple[str, ...], step: int, output: Path | None) -> None:
    """Repeat a step of RUN, and compare it with the original. It starts from the checkpoint before the step, and trains
    on the records that `logging.rollouts.documents: all` kept. Changed options show their effect on the step."""
    with _display():
        from truestep.ranks.group import leave
        from truestep.tools.replay.replay import replay as again

        found = again(run, step, output, list(overrides))
    leave()
    if int(os.environ.get("RANK", "0")):  # only the first rank prints
        return
    _print(found.text)
    if not found.lawful and not found.changed:
        sys.exit(1)


@main.command(context_settings=_FREE_OPTIONS, short_help="Find what made a metric of RUN jump.")
@click.argument("run", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[--section.option VALUE]...")
@click.option("--metric", required=True, help="A metric of metrics.jsonl, such as grad_norm or loss.")
@click.option("--step", type=click.IntRange(min=1), help="The step to look into. Without it, that of the largest jump.")
@click.option("--output", type=click.Path(path_type=Path), help="A new directory for what is found.")
@_guarded
def bisect(run: Path, overrides: tuple[str, ...], metric: str, step: int | None, output: Path | None) -> None:
    """Find the documents and labels of RUN that made a metric jump. It repeats the step without parts of its documents,
    with the denominators and advantages of the whole step."""
    with _display():
        from truestep.ranks.group import leave
        from truestep.tools.replay.bisect import bisect as find

        found = find(run, metric, step, output, list(overrides))
    leave()
    if int(os.environ.get("RANK", "0")):  # only the first rank prints
        return
    _print(found.text)
    if found.replay is not None and not found.replay.lawful and not found.replay.changed:
        sys.exit(1)


@main.command(short_help="Name the first difference between two runs.")
@click.argument("first", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("second", type=click.Path(path_type=Path, exists=True, file_okay=False))
@_guarded
def compare(first: Path, second: Path) -> None:
    """Name the first difference between two runs, or a run and its replay. It also names the cause: the order of
    documents, the data, an option, or numerics. Exit code 1 if there is a difference."""
    from truestep.tools.replay.compare import compare as run

    found = run(first, second)
    _print(found.text)
    if found.step is not None:
        sys.exit(1)


@main.command()
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/demo"), show_default=True)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seeds the model, the task and the sampling.",
)
@_guarded
def demo(output: Path, seed: int) -> None:
    """Run a whole RL training on this machine. Make a tiny model, train it with GRPO, and write a report."""
    from truestep.tools.demo.run import run

    run(output, seed, Console())


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="A model directory. Without it a tiny model is made.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seeds the prompts.")
@click.option(
    "--template",
    type=click.Choice(["reward", "math", "json", "tool-agent", "sft", "dpo-like"]),
    default="reward",
    show_default=True,
    help="reward: a reward of yours. math: numbers as answers. json: a reward in parts. tool-agent: several turns with "
    "a tool. sft: chats. dpo-like: preference pairs, by a loop of yours.",
)
@_guarded
def init(directory: Path, model: Path | None, seed: int, template: str) -> None:
    """Write a complete example task to DIRECTORY. The task has data, a configuration, a README with the commands, and a
    test of the reward if it has one."""
    from truestep.tools.init.make import init as run

    if model is None:
        _print("making a tiny model, which takes some seconds")
    written = run(directory, model, seed, template=template)
    _print(f"{directory}: {', '.join(path.name for path in written)}")
    command = "python train.py" if (directory / "train.py").exists() else "truestep train config.yaml"
    _print(f"next: cd {directory} && {command}")
