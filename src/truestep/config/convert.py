"""Converts a configuration of another trainer: its options under our names, and a comment for each that has no equal.

Their files are YAML, TOML, or a script with `--name value` or `name=value` on a command line. Imports no torch.
"""

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from truestep.config import describe, foreign
from truestep.config.load import check_options
from truestep.config.yaml_tree import ConfigError

# What every run that samples needs. Each is filled in where their file has no equal, with what to put there.
_NEEDED: dict[str, tuple[Any, str]] = {
    "model.path": ("path/to/the/model", "a Hugging Face directory"),
    "data.group_size": (8, "completions of each prompt"),
    "sampler.prompts": ("prompts.jsonl", 'a file of {"prompt": ..., other fields}'),
    "sampler.reward": ("my_package.rewards:score", "reward(prompt, completion, **fields) -> number: docs/rewards.md"),
    "schedule.docs_per_step": (128, "documents of a step: prompts times completions"),
    "schedule.steps": (100, "steps of the run"),
}
_UNKNOWN = "no trainer that truestep knows has it"
_WIDTH = 118
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^}]*))?\}")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)

Given = dict[str, Any]  # their options by dotted name


@dataclass
class Converted:
    """Our options, each with the one of theirs that it comes from, and theirs that have no equal, with the reason."""

    ours: dict[str, Any] = field(default_factory=dict)
    of: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    filled: list[str] = field(default_factory=list)

    @property
    def summary(self) -> str:
        left = len(self.left) + len(self.unset)
        return f"{len(self.of)} options converted, {left} of theirs as comments, {len(self.filled)} to fill in"


def convert(path: Path) -> tuple[str, Converted]:
    """Return a configuration made from another trainer's file, and what became of its options."""
    given = read_foreign(path)
    converted = _converted(given)
    _fill_in(converted)
    _drop_what_does_not_load(converted)
    return _written(converted, given, path), converted


def read_foreign(path: Path) -> Given:
    """Read a file of another trainer's options."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            tree: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml", ".json"):
            tree = yaml.safe_load(text)
        else:
            return _checked(path, dict(_of_command_line(text)))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    given = dict(_flat(tree)) if isinstance(tree, Mapping) else {}
    return _checked(path, {name: _resolved(value, given) for name, value in given.items()})


def _checked(path: Path, given: Given) -> Given:
    if not given:
        raise ConfigError(f"{path}: no options are in it: convert reads YAML, TOML, and scripts with --name value")
    return given


def _flat(tree: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((".".join(name), value) for name, value in foreign.leaves(tree))


def _resolved(value: Any, given: Given) -> Any:
    """Return the value of the option that `${section.option}` refers to, or its default."""
    for _ in range(8):
        if not isinstance(value, str) or (found := _REFERENCE.fullmatch(value)) is None:
            return value
        value = given.get(found[1], None if found[2] is None else yaml.safe_load(found[2]))
    return value


def _of_command_line(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a shell script: --name value, --name=value and name=value."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="()")
    lexer.whitespace_split = True
    words, name, values = list(lexer), None, list[str]()
    for word in [*words, "--"]:
        flag = re.fullmatch(r"--([A-Za-z][\w.-]*)(=.*)?", word, re.DOTALL)
        ends = flag or word in ("--", "(", ")") or word.startswith("${") or _OVERRIDE.fullmatch(word)
        if ends and name is not None:
            yield name, _value(values)
            name, values = None, []
        if flag is not None:
            name = flag[1].replace("-", "_")
            values = [flag[2][1:]] if flag[2] else []
        elif not ends and name is not None:
            values.append(word)
        elif (override := _OVERRIDE.fullmatch(word)) is not None and "." in override[1]:
            yield override[1], _scalar(override[2] or "null")


def _value(words: list[str]) -> Any:
    read = [_scalar(word) for word in words]
    return True if not read else read[0] if len(read) == 1 else read


def _scalar(word: str) -> Any:
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", word):  # YAML wants a point in it
        return float(word)
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _converted(given: Given) -> Converted:
    converted = Converted()
    found_by_name = {name: foreign.table().find(tuple(name.split("."))) for name in given}
    # One value for two of our options, such as a clip's two sides, gives way to what is of one of them alone.
    for name in sorted(given, key=lambda name: _is_for_several(found_by_name[name], given[name])):
        value, found = given[name], found_by_name[name]
        if value is None:
            converted.unset.append(name)
        elif isinstance(found, foreign.Foreign) and found.here is not None:
            _take(converted, name, value, found, given)
        elif name in describe.options():
            converted.ours.setdefault(name, value)
            converted.of.setdefault(name, name)
        else:
            note = found if isinstance(found, str) else found.note if found is not None else _UNKNOWN
            converted.left[name] = note or "truestep has none like it"
    return converted


def _is_for_several(found: Any, value: Any) -> bool:
    return " and " in (getattr(found, "here", None) or "") and not isinstance(value, list)


def _take(converted: Converted, name: str, value: Any, found: foreign.Foreign, given: Given) -> None:
    """Set the option of ours that one of theirs is, or note why its value cannot be converted."""
    assert found.here is not None
    for condition in found.when:
        if not _holds(name, condition, given):
            converted.left[name] = f"{found.here} is not set, since {condition} is not"
            return
    try:
        values = found.all_converted(value, foreign.group_size(given))
    except foreign.NoValueError:
        converted.left[name] = f"write {found.here}{f': {found.note}' if found.note else ''}"
        return
    if all(ours is None for ours in values.values()):
        converted.left[name] = f"{found.here} is null here, which is its default"
        return
    new = {option: ours for option, ours in values.items() if option not in converted.ours}
    if not new:
        first = next(iter(values))
        converted.left[name] = f"{first} comes from {converted.of[first]}"
        return
    converted.ours |= new
    converted.of |= dict.fromkeys(new, name)
    if not any(_holds(name, condition, given) for condition in found.unless):
        converted.ours |= {option: also for option, also in found.also.items() if option not in converted.ours}


def _holds(name: str, condition: str, given: Given) -> bool:
    """Return whether another option of theirs, the nearest one of its name, is set, or has a value (`name=value`)."""
    condition, equals, wanted = condition.partition("=")
    sections = name.split(".")[:-1]
    for depth in range(len(sections), -1, -1):
        inside = ".".join(sections[:depth])
        for other, value in given.items():
            if other.startswith(inside) and (other == condition or other.endswith(f".{condition}")):
                return str(value) == wanted if equals else bool(value)
    return False


def _fill_in(converted: Converted) -> None:
    for option, (value, _) in _NEEDED.items():
        if converted.ours.get(option) is None:
            converted.ours[option] = value
            converted.filled.append(option)


def _drop_what_does_not_load(converted: Converted) -> None:
    """Check our options, and move each that the check complains about to the comments, until there is no complaint."""
    for _ in range(len(converted.ours) + len(_NEEDED)):
        problems = check_options(_tree(converted.ours))
        if not problems:
            return
        problems = [problem for problem in problems if problem.endswith(" is required")] or problems
        for option, problem in {_blamed(problem, converted): problem for problem in problems}.items():
            converted.ours.pop(option, None)
            if (theirs := converted.of.pop(option, None)) is not None:
                converted.left[theirs] = f"not taken: {problem.removeprefix('options: ')}"
        _fill_in(converted)
    raise ConfigError("the options cannot be converted to any that agree")


def _blamed(problem: str, converted: Converted) -> str:
    """Return the option of ours that a complaint is about: one that it names, or the type of a section in it."""
    words = set(re.findall(r"\w[\w.]*", problem))
    words |= {word.rpartition(".")[0] for word in words}
    theirs = [option for option in converted.ours if option not in converted.filled]
    named = [option for option in theirs if option in words]
    inside = [option for option in theirs if _sections(option) & words]
    deepest = sorted(
        inside, key=lambda option: (-max(map(len, _sections(option) & words)), not option.endswith(".type"))
    )
    if not named and not deepest:
        raise ConfigError(f"the options cannot be converted: {problem}")
    return named[-1] if named else deepest[0]


def _sections(option: str) -> set[str]:
    parts = option.split(".")
    return {".".join(parts[:depth]) for depth in range(1, len(parts))}


def _tree(options: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, leaf = name.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[leaf] = value
    return tree


def _written(converted: Converted, given: Given, path: Path) -> str:
    head = [
        f"# Made from {path.name} by `truestep convert`: {converted.summary}.",
        "# Behind each option stands theirs. Their options that have no equal here are at the end, by the reason.",
        "",
    ]
    lines = list(_section(_tree(converted.ours), (), converted, given))
    end: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, why in converted.left.items():
        reasons.setdefault(why, []).append(f"{name}: {foreign.shown(given[name])}")
    if converted.unset:
        reasons["unset in their file (null)"] = converted.unset
    for why, names in reasons.items():
        end += ["", *textwrap.wrap(f"{why}:", _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        for name in names:
            end += textwrap.wrap(name, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join([*head, *lines, *end]) + "\n"


def _section(tree: Mapping[str, Any], inside: tuple[str, ...], converted: Converted, given: Given) -> Iterator[str]:
    indent = "  " * len(inside)
    for key in sorted(tree, key=lambda key: (_order((*inside, key)), key != "type")):
        value, name = tree[key], ".".join((*inside, key))
        if isinstance(value, Mapping) and name not in converted.ours:
            yield f"{indent}{key}:"
            yield from _section(value, (*inside, key), converted, given)
            continue
        written = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        text = f"{key}: {written.removesuffix('...' + chr(10)).strip()}"
        if name in converted.filled:
            yield f"{indent}{text}  # fill in: {_NEEDED[name][1]}"
        elif (theirs := converted.of.get(name)) is not None:
            same = given[theirs] == value and type(given[theirs]) is type(value)
            yield f"{indent}{text}  # {theirs}{'' if same else f': {foreign.shown(given[theirs])}'}"
        else:
            yield f"{indent}{text}"


def _order(name: tuple[str, ...]) -> int:
    """Return the place of an option or a section in our own order."""
    dotted = ".".join(name)
    known = list(describe.options())
    return next(
        (place for place, option in enumerate(known) if option == dotted or option.startswith(f"{dotted}.")), 999
    )
