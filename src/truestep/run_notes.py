"""The notes that a run prints before its first step: where it goes on, which options changed, what was rejected."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truestep.config.load import ConfigError, load_config
from truestep.config.schema import Config
from truestep.files import count_lines
from truestep.policy.policy import Policy
from truestep.rollouts.rejects import reason_kind
from truestep.rollouts.source import FileSource, Source
from truestep.run_directory import RunDirectory
from truestep.sampler.in_process import stop_ids
from truestep.text import printable, redacted_options
from truestep.types import Rejected


def run_notes(
    directory: RunDirectory,
    config: Config,
    policy: Policy,
    source: Source,
    rejected: Sequence[Rejected],
    latest: Path | None,
    step: int,
) -> list[str]:
    notes = []
    if latest is not None:
        notes += [f"going on after step {step} of {latest}", *_changes_since(directory, config)]
    elif done := count_lines(directory.ledger):
        notes.append(f"{directory.path} has no checkpoint: starting again, its {done} steps are removed")
    if policy.device.type == "cuda":
        notes.append(f"attention: {policy.attends.story}")
    if rejected:
        kinds = Counter(reason_kind(record.reason) for record in rejected)
        reasons = "; ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
        total = f"of {len(rejected) + len(source.documents)} " if isinstance(source, FileSource) else ""
        notes.append(f"{len(rejected)} {total}records are rejected: {reasons}; see {directory.rejected}")
    if config.sampler is not None and not stop_ids(policy):
        notes.append(
            "warning: neither the model's configuration nor its tokenizer names an end-of-text token: every completion "
            "runs to sampler.max_new_tokens"
        )
    return notes


def _changes_since(directory: RunDirectory, config: Config) -> list[str]:
    """Name the options that differ from those the run was started with. That is allowed, but should not surprise."""
    try:
        before = _flat(redacted_options(load_config(directory.config).model_dump()))
    except ConfigError:  # written by another version, or gone
        return []
    now = _flat(redacted_options(config.model_dump()))  # a secret that changed is no one's business
    notes = [
        f"{name} is now {printable(now.get(name))}; before it was {printable(before.get(name))}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]
    if before.get("model.path") != now.get("model.path"):
        notes.append("the weights still come from the checkpoint: model.path is read at a run's beginning only")
    return notes


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
