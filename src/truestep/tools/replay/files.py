"""What a run has written of each step: ledger, metrics, weights, options, records."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from truestep.config.load import ConfigError, load_config
from truestep.errors import TruestepError
from truestep.files.whole import lines_by_step
from truestep.rollouts.kept.records import Block, blocks_of
from truestep.run.directory import RunDirectory
from truestep.run.weight_lines import WeightLine, read_weight_lines
from truestep.text import redacted_options

# Sections and options that change no number of a step.
_WITHOUT_EFFECT = ("checkpoint.", "logging.", "evaluation.", "model.path", "schedule.steps", "schedule.stall_timeout")
_LAYOUT = (
    *(
        "parallel.",
        "data.tokens_per_microbatch",
        "data.pad_to_multiple",
        "data.share_prefixes",
        "schedule.breadth_first",
    ),
    *("model.compile", "model.attention", "model.activation", "model.head.logits_chunk_size", "model.device"),
    *("optimizer.offload", "deterministic"),
)
# Options that decide which documents there are, and in which order.
_DOCUMENTS = ("data.", "sampler.", "seed", "schedule.")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, by step."""

    path: Path

    def check(self) -> None:
        if not self.ledger:
            raise TruestepError(
                f"{self.path} has no step in its ledger.jsonl: name the directory of a run (its checkpoint.directory) "
                "that made steps"
            )

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path, writes=False)

    @cached_property
    def ledger(self) -> dict[int, Mapping[str, Any]]:
        return dict(self.directory.read_steps())

    @cached_property
    def metrics(self) -> Mapping[int, Mapping[str, Any]]:
        return lines_by_step(self.directory.metrics)

    @cached_property
    def weights(self) -> dict[int, WeightLine]:
        return read_weight_lines(self.directory)

    @cached_property
    def records(self) -> dict[int, Block]:
        return {block.step: block for block in blocks_of(self.directory.records)}

    def reads_a_file(self, step: int) -> bool:
        """Tell whether a step's documents come from files that were there before the run, and were not sampled by
        it."""
        return self.options(step).get("data.path") is not None

    def options(self, step: int) -> dict[str, Any]:
        """Return the options that made a step, by dotted name; none if they cannot be read."""
        try:
            config = load_config(self.directory.options_of(step))
        except ConfigError:
            return {}
        return flat(redacted_options(config.model_dump()))


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@dataclass(frozen=True)
class Changed:
    """The options in which two steps differ, each with both values."""

    all: Mapping[str, tuple[Any, Any]]

    @staticmethod
    def of(first: Mapping[str, Any], second: Mapping[str, Any]) -> "Changed":
        """Compare the options of two steps. Options that could not be read, which are empty, differ from none."""
        if not first or not second:
            return Changed({})
        names = [*first, *(name for name in second if name not in first)]
        return Changed(
            {
                name: (first.get(name), second.get(name))
                for name in names
                if first.get(name) != second.get(name) and not name.startswith(_WITHOUT_EFFECT)
            }
        )

    @property
    def of_layout(self) -> list[str]:
        return [name for name in self.all if name.startswith(_LAYOUT)]

    @property
    def of_numbers(self) -> list[str]:
        """The options that change results, by definition."""
        return [name for name in self.all if not name.startswith(_LAYOUT)]

    @property
    def of_documents(self) -> list[str]:
        return [name for name in self.of_numbers if name.startswith(_DOCUMENTS)]

    def said(self, names: list[str]) -> str:
        some = [f"{name} is {self.all[name][0]} and {self.all[name][1]}" for name in names[:5]]
        more = f" and {len(names) - 5} more options" if len(names) > 5 else ""
        return "; ".join(some) + more
