"""The messages of a run before its first step (model, device, data, memory, changed options) and after its last."""

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import torch

from truestep.config.describe import show_value
from truestep.config.load import ConfigError, load_config
from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler, ServerSampler, files_of, place_of
from truestep.errors import TruestepError
from truestep.files.whole import count_lines
from truestep.generate.read import stop_ids
from truestep.model.policy import Policy
from truestep.plan.advice import layout_of, most_of
from truestep.plan.cost import plan_time
from truestep.plan.memory import GIB
from truestep.plan.rates import kept_here
from truestep.plan.shape import read_shape
from truestep.rollouts.rejects import reason_kind
from truestep.rollouts.source import FileSource, Source
from truestep.run.directory import RunDirectory
from truestep.text import printable, redacted_options
from truestep.types import Rejected
from truestep.weights.remote_parts import from_keepers


def run_notes(
    directory: RunDirectory,
    config: Config,
    policy: Policy,
    source: Source,
    rejected: Sequence[Rejected],
    latest: Path | None,
    step: int,
    before: Config | None,
) -> list[str]:
    """Return messages on the checkpoint that the run resumes from, on options that differ from `before` (the options of
    the steps so far), on rejected records, and on options that look like mistakes."""
    notes = []
    if latest is not None:
        where = "the state in memory" if from_keepers(latest) else latest
        notes += [f"going on after step {step} of {where}", *_changes_since(before, config)]
    elif done := count_lines(directory.ledger):
        notes.append(f"{directory.path} has no checkpoint: starting again, its {done} steps are removed")
    if not Path(cache_from_source(torch.__file__)).exists():
        notes.append(
            "Python keeps no bytecode here (PYTHONDONTWRITEBYTECODE is set, or a directory is read-only): each start "
            "compiles torch's and transformers' sources for about ten seconds; PYTHONPYCACHEPREFIX=DIRECTORY keeps it"
        )
    if policy.device.type == "cuda":
        notes.append(f"attention: {policy.attends.story}")
        if policy.recurs.story:
            notes.append(f"recurrent layers: {policy.recurs.story}")
    if rejected:
        kinds = Counter(reason_kind(record.reason) for record in rejected)
        reasons = "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
        total = f"of {len(rejected) + len(source.documents)} " if isinstance(source, FileSource) else ""
        notes.append(f"{len(rejected)} {total}records are rejected: {reasons}; see {directory.rejected}")
    wanted = config.schedule.docs_per_step
    if isinstance(source, FileSource) and 0 < source.total < wanted:
        notes.append(
            f"warning: schedule.docs_per_step: {wanted} is more than the {source.total} documents that there are: the "
            "whole run is one step of these"
        )
    if config.sampler is not None and not stop_ids(policy):
        notes.append(
            "warning: neither the model's configuration nor its tokenizer names an end-of-text token: every completion "
            "runs to sampler.max_new_tokens"
        )
    return notes


def options_before(directory: RunDirectory, step: int) -> Config | None:
    """Read the options that made a step; None if there are none, or if another version wrote them."""
    try:
        return load_config(directory.options_of(step))
    except ConfigError:
        return None


def _changes_since(made_by: Config | None, config: Config) -> list[str]:
    """Return a message for each option that differs from the options of the run's last step, `made_by`."""
    if made_by is None:
        return []
    before = _flat(redacted_options(made_by.model_dump()))
    now = _flat(redacted_options(config.model_dump()))  # redacted: a message must not show a secret
    notes = [
        f"{name} is now {_plain(now.get(name))}; before it was {_plain(before.get(name))}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    if before.get("model.path") != now.get("model.path"):
        notes.append(
            "the weights still come from the checkpoint: model.path is read only at a run's beginning. To begin with "
            "the new model, name another checkpoint.directory"
        )
    return notes


def _plain(value: Any) -> str:
    return printable(show_value(value))


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def what_runs(config: Config, policy: Policy, directory: RunDirectory, source: Source, ranks: int) -> list[str]:
    """Describe the loss, model, device, documents and planned memory of a run, one line each."""
    pieces = policy.weights.pieces.values()
    weights = sum(math.prod(piece.shape) for piece in pieces)
    trained = sum(math.prod(piece.shape) for piece in pieces if piece.trained)
    some = "" if trained == weights else f", {_many(trained)} of them trained"
    kind = type(policy.model).__name__
    return [
        f"run: {config.loss.type}, {_steps(config)}, in {directory.path}",
        f"model: {config.model.path} ({kind}), {_many(weights)} parameters{some}, computes in {config.model.dtype}",
        f"device: {_device(policy.device)}{f', {ranks} ranks' if ranks > 1 else ''}",
        f"documents: {_documents(config, source)}",
        f"memory planned: {_memory(config, ranks)}",
    ]


def _steps(config: Config) -> str:
    schedule = config.schedule
    steps = "steps" if schedule.steps is None else f"{schedule.steps:,} steps"
    size = f" of {schedule.docs_per_step:,} documents" if schedule.docs_per_step else ""
    return f"{steps}{size}{' until the data ends' if schedule.steps is None else ''}"


def _many(count: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count:,}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return f"{facts.name}, {facts.total_memory / GIB:.0f} GiB"
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def _documents(config: Config, source: Source) -> str:
    sampler = config.sampler
    if sampler is not None:
        prompts = getattr(source, "prompts", None)
        count = "" if prompts is None else f"{len(prompts):,} "
        by = "here" if isinstance(sampler, InProcessSampler) else _servers(sampler)
        group = config.data.group_size
        files = files_of(sampler.prompts).values()
        place = ", ".join(printable(place_of(file)) for file in files) or "the environment"
        return f"{count}prompts of {place}, {group} completions of each, sampled {by}"
    if isinstance(source, FileSource):
        times = f", {source.epochs} times" if source.epochs > 1 else ""
        return f"{len(source.documents):,} of {printable(config.data.path)}{times}"
    return printable(config.data.path) if config.data.path is not None else "sent while the run goes on"


def _servers(sampler: ServerSampler) -> str:
    if sampler.start is None:
        return "by " + ", ".join(map(printable, sampler.urls or ()))
    gpus = sampler.start.gpus
    return f"by servers that the run starts ({sampler.protocol}{f', GPUs {gpus}' if gpus else ''})"


def _memory(config: Config, ranks: int) -> str:
    try:
        shape, layout = read_shape(config), layout_of(config, ranks)
        planned, rates = most_of(config, shape, layout), kept_here(ranks)
        step = None if rates is None else plan_time(config, shape, layout, rates)
    except TruestepError as error:  # the model's layers are not found; the run does not need the plan
        return f"not known ({printable(error, 100)})"
    timed = "" if step is None else f"; {step.total:.2f} s of computing for {step.tokens:,.0f} tokens"
    rank = ", on the rank that needs most" if ranks > 1 else ""
    size = f"with micro-batches of {config.data.tokens_per_microbatch:,} tokens"
    return f"{planned / GIB:.1f} GiB at the peak of a step{rank}, {size}{timed}"


def longer_by(config: Config, steps_made: int) -> str | None:
    """Return the option that makes a finished run longer; None if a stream was the source and its sender ended it."""
    if config.schedule.steps is not None and steps_made >= config.schedule.steps:
        return "schedule.steps"
    return "data.epochs" if config.data.path is not None else None


def what_next(
    directory: Path,
    finished: bool,
    longer: str | None,
    command: Sequence[str],
    best: Path | None = None,
    width: int | None = None,
    made: bool = True,
) -> list[str]:
    """List the commands that are useful after a run. `command` is the training command as a list of words, `longer` the
    option that makes a finished run longer, `best` the checkpoint that was kept because it is the best. If a line would
    be longer than `width`, each command gets a line of its own. `made`: a step was made; without one there is no page
    and no model."""
    run = str(directory)
    rows = {}
    if made:
        rows["the page of this run"] = ["truestep", "report", run]
        rows["its model, for other programs"] = ["truestep", "export", run, "--output", "DIRECTORY"]
    if best is not None:
        rows[f"its best one, of {best.name}"] = ["truestep", "export", run, "--best", "--output", "DIRECTORY"]
    if not finished:
        rows["go on from here"] = list(command)
    elif longer is not None:
        rows["train further"] = [*_without(f"--{longer}", command), f"--{longer}", "NUMBER"]
    if not rows:
        return []
    longest = max(map(len, rows)) + 1
    lines = [f"  {what + ':':<{longest}} {shlex.join(typed)}" for what, typed in rows.items()]
    if width is not None and max(map(len, lines)) > width:
        lines = [line for what, typed in rows.items() for line in (f"  {what}:", f"    {shlex.join(typed)}")]
    return ["next:", *lines]


def _without(option: str, command: Sequence[str]) -> list[str]:
    """Remove an override from a command, written as `option value` or as `option=value`."""
    kept: list[str] = []
    words = iter(command)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
