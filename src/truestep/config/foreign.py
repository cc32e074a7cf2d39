"""Translates option names and values of other trainers to ours, for error messages and `convert`. Imports no torch.

The names are in foreign.yaml, which is read when an option is unknown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

_TABLE = Path(__file__).with_name("foreign.yaml")
_SERVER = "a server has options of its own: give them where it is started (docs/sampling.md)"
# How values are converted, by the names that foreign.yaml uses. A value marked `differs` has no conversion.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "integer": int,
    "list": lambda value: f"[{value}]",
    "at least 0": lambda value: max(int(value), 0),
    "null if 0": lambda value: value or None,
    "one or more": lambda value: value if isinstance(value, list) else [value],
    "pairs": lambda value: dict(zip(value[::2], value[1::2], strict=True)) if isinstance(value, list) else value,
    "null if -1": lambda value: None if value in (-1, 0) else value,
}
_GROUP_SIZES = (
    *("rollout.n", "n_samples_per_prompt", "num_generations", "num_generations_per_prompt"),
    *("num_samples_per_prompt_rollout", "rollouts_per_example", "data.group_size"),
)

Name = tuple[str, ...]


class NoValueError(Exception):
    """A value that cannot be converted."""


@dataclass(frozen=True)
class Foreign:
    """An option of other trainers. Example: `max_steps` of TRL, here `schedule.steps`."""

    of: Sequence[str]
    here: str | None  # this trainer's option; None: there is none
    note: str = ""
    value: str = ""  # a conversion; `differs`: there is none; `times the group`: from prompts to documents
    values: Mapping[Any, Any] = field(default_factory=dict)  # our value for each of theirs
    # For `truestep convert`. A condition is `name` (an option of that trainer is set) or `name=value`.
    when: Sequence[str] = ()  # conditions without which this option has no effect
    # More of our options to set: a value for each, or a mapping from this option's value to ours.
    also: Mapping[str, Any] = field(default_factory=dict)
    unless: Sequence[str] = ()  # conditions under which `also` is ignored
    differs_with: Sequence[str] = ()  # conditions under which this option cannot be converted
    gives_way: bool = False  # True: another option with the same equivalent takes precedence

    def converted(self, value: Any, group_size: Any = None) -> Any:
        if self.values:
            if not isinstance(value, bool | int | str) or value not in self.values:
                raise NoValueError
            return self.values[value]
        if self.value == "times the group":
            if type(value) is not int or type(group_size) is not int:
                raise NoValueError
            return value * group_size
        if self.value == "differs" or not isinstance(value, bool | int | float | str | list) or "${" in str(value):
            raise NoValueError
        try:
            return _CONVERSIONS.get(self.value, lambda value: value)(value)
        except (TypeError, ValueError, ArithmeticError):
            raise NoValueError from None

    def all_converted(self, value: Any, group_size: Any = None) -> dict[str, Any]:
        """Return the values of our options in `here`, which names one option, or several joined by `and`."""
        ours = (self.here or "").split(" and ")
        if len(ours) == 1:
            return {ours[0]: self.converted(value, group_size)} if " or " not in ours[0] else self._none()
        if isinstance(value, list) and len(value) == len(ours):
            return dict(zip(ours, value, strict=True))
        return dict.fromkeys(ours, self.converted(value, group_size))

    def _none(self) -> dict[str, Any]:
        raise NoValueError

    def explain(self, value: Any, group_size: Any = None) -> str:
        """Return a sentence with what to write instead of this option."""
        whose = f"it is an option of {_join(self.of)}"
        if self.here is None:
            return f"{whose}, and truestep has none like it{f': {self.note}' if self.note else ''}"
        try:
            example = f": {shown(self.converted(value, group_size))}"
        except NoValueError:
            example = ""
        return f"{whose}; write {self.here}{example}{f' ({self.note})' if self.note else ''}"


@dataclass(frozen=True)
class _Table:
    read: Mapping[str, str]
    sections: Mapping[str, str]
    options: Mapping[str, Foreign]
    alone: Mapping[str, Foreign]  # options that are known only without a section

    def find(self, name: Name) -> Foreign | str | None:
        """Return the option that the last parts of a name match, or the reason why its section does not exist here."""
        if len(name) == 1 and name[0] in self.alone:
            return self.alone[name[0]]
        for start, part in enumerate(name):
            end = ".".join(name[start:])
            if end != part and end in self.options:
                return self.options[end]
            if part in self.sections:
                return self.sections[part]
        return self.options.get(name[-1])


@cache
def table() -> _Table:
    content = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    options = {name: Foreign(**fields) for name, fields in content["options"].items()}
    for group in content["none"]:
        options |= {name: Foreign(group["of"], None, group["why"]) for name in group["names"] if name not in options}
    alone = {name: Foreign(**fields) for name, fields in content["alone"].items()}
    servers = {name: Foreign(("inference servers",), None, _SERVER) for name in content["servers"]}
    return _Table(content["read"], content["sections"], options | servers, alone)


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def explain(name: Sequence[str], value: Any = None, options: Mapping[str, Any] | None = None) -> str | None:
    """Return what to write instead of another trainer's option; None if no known trainer has it. `options`: all given
    options, which may include the group size."""
    if not name:
        return None
    found = table().find(tuple(part.replace("-", "_").lstrip("+~") for part in name))
    if isinstance(found, str):
        return f"it is an option of another trainer, and truestep has none like it: {found}"
    if found is None:
        return None
    return found.explain(value, group_size(options or {}) if found.value == "times the group" else None)


def is_section(name: Sequence[str]) -> bool:
    """Return whether a name is in a section of another trainer that has no counterpart here."""
    return isinstance(table().find(tuple(name)), str)


def group_size(options: Mapping[str, Any]) -> Any:
    given = {".".join(name): value for name, value in leaves(options)}
    ends = tuple(f".{name}" for name in _GROUP_SIZES)
    return next((value for name, value in given.items() if f".{name}".endswith(ends)), None)


def leaves(options: Mapping[str, Any], inside: Name = ()) -> Iterator[tuple[Name, Any]]:
    """Yield the options below a section, with their full names."""
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, (*inside, str(name)))
        else:
            yield (*inside, str(name)), value


def markdown_table() -> str:
    """Return docs/coming-from.md: tables of each trainer's option names and ours."""
    lines = [
        "# Coming from another trainer",
        "",
        "<!-- Written by `python -m truestep.config.foreign > docs/coming-from.md`; a test compares the two. -->",
        "",
        "An option under another trainer's name is an error that says what to write instead, in a file and on the",
        "command line, in any section: `actor_rollout_ref.actor.optim.lr`, `trainer.optim.lr` and `lr` are all known.",
        "One message covers all options of a file. A value that has another meaning here is converted in the message.",
        "",
        "`truestep convert THEIRS --output run.yaml` converts a whole file of another trainer: YAML, TOML, or a",
        "script with `--name value` or `name=value`. A comment after each converted option has the original. Options",
        "without an equivalent, and values that cannot be converted, become comments with the reason.",
        "",
        "- An option that the original file leaves out has our default ([configuration.md](configuration.md)), which",
        "  may differ from the other trainer's.",
        "- A step here is one update. If the other trainer makes several updates of a batch, `schedule.docs_per_step`",
        "  is its mini-batch in documents. `schedule.steps` counts updates; its value is not converted.",
        "- Passwords and keys are `***` in comments. A script's variables are replaced if the script sets them.",
        "",
        "The names are from the sources of these trainers:",
        "",
        *(
            line
            for trainer, read in table().read.items()
            for line in wrap(f"- {trainer}: {read}", 120, subsequent_indent="  ")
        ),
        "",
        "The names of transformers and DeepSpeed are from their documentation. Other versions may have other names.",
    ]
    options = table().options
    owners = {owner for found in options.values() for owner in found.of}
    for trainer in sorted(owners, key=str.lower):
        lines += ["", f"## {trainer}", "", "| there | here | note |", "| --- | --- | --- |"]
        for name, found in {**options, **table().alone}.items():
            if trainer in found.of:
                lines.append(f"| `{name}` | {_code(found.here)} | {found.note} |")
    lines += ["", "## Sections that are not here", "", "| there | why |", "| --- | --- |"]
    lines += [f"| `{name}` | {why} |" for name, why in table().sections.items()]
    return "\n".join(lines)


def _code(option: str | None) -> str:
    if option is None:
        return "none"
    joint = next((word for word in (" and ", " or ") if word in option), None)
    return joint.join(f"`{part}`" for part in option.split(joint)) if joint else f"`{option}`"


if __name__ == "__main__":
    print(markdown_table())
