"""Converts another trainer's configuration: options get our names, and options without an equivalent become comments.

The other trainer's file is YAML, TOML, or a script with `--name value` or `name=value` on a command line. In this file,
"ours" and "theirs" are the options of truestep and of the other trainer. Imports no torch.
"""

import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truestep.config import describe, foreign, yaml_tree
from truestep.config.load import check_options
from truestep.config.yaml_tree import ConfigError
from truestep.files.bounded import SETTINGS, TooLargeError, too_long
from truestep.files.disks import no_file
from truestep.text import printable, redacted_options

# Options that every run with a sampler needs. If their file has no equivalent: the value to fill in, and a hint for it.
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
_LONGEST = 10_000  # characters of a value in a comment
# Tokens of a shell script: separators of words, ends of a command or of an option's values, and words.
_SHELL = re.compile(
    r"(?P<between>[ \t\r]+|\\(?:\n|\Z)|#[^\n]*)|(?P<end>\n|\d*&?[<>]+&?|[;|&()]+)"
    r"""|(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s\\'";|&()<>])+)""",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\}|\Z)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)

Given = dict[str, Any]  # their options, by dotted name


@dataclass
class Converted:
    """The result of a conversion, by option name.

    `ours`: values of our options. `of`: their option from which ours was converted. `left`: their options that were not
    converted, with the reason. `unset`: their options that are null. `filled`: our options that the user must fill in.
    """

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
    if (kind := no_file(path)) is not None:
        raise ConfigError(f"{path}: cannot be read: it is {kind}, not a file")
    try:
        if path.stat().st_size > SETTINGS:
            raise TooLargeError(too_long(SETTINGS))
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            tree: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml", ".json"):
            tree = yaml_tree.load(text)
        else:
            return _checked(path, dict(_of_command_line(text, {})))
        given = dict(_flat(tree)) if isinstance(tree, Mapping) else {}
    except (OSError, *yaml_tree.UNREADABLE) as error:
        raise ConfigError(f"{path}: cannot be read: {printable(' '.join(str(error).split()))}") from None
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
        value = given.get(found[1], None if found[2] is None else yaml_tree.load(found[2]))
    return value


def _of_command_line(text: str, variables: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a shell script: --name value, --name=value and name=value, also in variables."""
    name, values = None, list[str]()
    for word in [*_words(text), None]:
        word = None if word is None else _with_variables(word, variables)
        flag = re.fullmatch(r"--([A-Za-z][\w.-]*)(=.*)?", word or "", re.DOTALL)
        override = _OVERRIDE.fullmatch(word or "")
        ends = flag or override or word is None or word == "--"
        if ends and name is not None:
            yield name, _value(values)
            name, values = None, []
        if flag is not None:
            name = flag[1].replace("-", "_")
            values = [flag[2][1:]] if flag[2] else []
        elif word is not None and (assigned := _ASSIGNMENT.fullmatch(word)) is not None:
            options = re.search(r"(^|\s)--[A-Za-z]", assigned[2])
            yield from _of_command_line(assigned[2], variables) if options else ()
            variables[assigned[1]] = "" if options else assigned[2]
        elif override is not None and "." in override[1]:
            yield override[1], _scalar(override[2] or "null")
        elif word is not None and not ends and name is not None:
            values.append(word)


def _words(text: str) -> Iterator[str | None]:
    """Yield the words of a shell script, with their quotes, and None where the values of an option end: at `;`, `|`,
    `>`, and the end of a line. A line does not end within parentheses, such as those of an array."""
    place, depth = 0, 0
    while place < len(text):
        if (found := _SHELL.match(text, place)) is None:
            raise ValueError(f"line {text.count(chr(10), 0, place) + 1}: a quotation that begins here has no end")
        if found["word"] is not None:
            yield found["word"]
        elif (end := found["end"]) is not None:
            depth = max(0, depth + end.count("(") - end.count(")"))
            if end != "\n" or depth == 0:
                yield None
        place = found.end()


def _with_variables(word: str, variables: Mapping[str, str]) -> str | None:
    """Remove a word's quotes, and replace the variables that the script has set. Return None for an array, and for a
    variable whose options were already read where it was set."""
    plain = "".join(shlex.split(word.replace("\\\n", "")))
    if re.fullmatch(r"\$(\{\w+\[[@*]\]\}|[@*])", plain):
        return None

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2] or ""
        return variables.get(name, f"${{{name}}}" if found[3] is None else found[3])

    filled = plain if word.startswith("'") else _VARIABLE.sub(value, plain)
    return None if plain and not filled else filled


def _value(words: list[str]) -> Any:
    read = [_scalar(word) for word in words]
    return True if not read else read[0] if len(read) == 1 else read


def _scalar(word: str) -> Any:
    try:
        return yaml_tree.load(word)
    except yaml_tree.UNREADABLE:
        return word


def _converted(given: Given) -> Converted:
    converted = Converted()
    found_by_name = {name: foreign.table().find(tuple(name.split("."))) for name in given}
    for name in sorted(given, key=lambda name: _gives_way(found_by_name[name], given[name])):
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


def _gives_way(found: Any, value: Any) -> bool:
    """Return whether their other options take precedence over this one. A value for two of our options, such as both
    bounds of a clip, gives way to an option for only one of the two."""
    several = " and " in (getattr(found, "here", None) or "") and not isinstance(value, list)
    return several or getattr(found, "gives_way", False)


def _take(converted: Converted, name: str, value: Any, found: foreign.Foreign, given: Given) -> None:
    """Convert one of their options to ours, or note why it cannot be converted."""
    assert found.here is not None
    for condition in found.when:
        if not _holds(name, condition, given):
            converted.left[name] = f"{found.here} is not set, since {condition} is not"
            return
    try:
        if any(_holds(name, condition, given) for condition in found.differs_with):
            raise foreign.NoValueError
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
        steps = "; schedule.steps counts updates of so many" if first == "schedule.docs_per_step" else ""
        converted.left[name] = f"{first} comes from {converted.of[first]}{steps}"
        return
    if not any(_holds(name, condition, given) for condition in found.unless):
        also = {option: of.get(value) if isinstance(of, Mapping) else of for option, of in found.also.items()}
        new |= {option: of for option, of in also.items() if of is not None and option not in converted.ours}
    converted.ours |= new
    converted.of |= dict.fromkeys(new, name)


def _holds(name: str, condition: str, given: Given) -> bool:
    """Return whether a condition on their other options holds: `other` is set, or has the value of `other=value`.

    If several sections have an option with this name, the one nearest to the option `name` counts.
    """
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
    """Check our options, and move each option that causes an error to the comments, until there are no errors."""
    for _ in range(len(converted.ours) + len(_NEEDED)):
        problems = check_options(_tree(converted.ours))
        if not problems:
            return
        required = {problem: name for problem, name in problems.items() if problem.endswith(" is required")}
        blamed = {_blamed(name, problem, converted): problem for problem, name in (required or problems).items()}
        for option, problem in blamed.items():
            converted.ours.pop(option, None)
            if (theirs := converted.of.pop(option, None)) is not None:
                converted.left[theirs] = f"not taken: {problem.removeprefix('options: ')}"
        _fill_in(converted)
    raise ConfigError("the options cannot be converted: they contradict each other")


def _blamed(name: str, problem: str, converted: Converted) -> str:
    """Return our option that causes an error: its subject, or an option that its message names, or a section's type."""
    if name in converted.ours and name not in converted.filled:
        return name
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
        f"# Made from {printable(path.name)} by `truestep convert`: {converted.summary}.",
        "# A comment after an option has the original one. Options without an equivalent are at the end, by reason.",
        "# An option that the original file leaves out has truestep's default here, which may differ.",
        "",
    ]
    lines = list(_section(_tree(converted.ours), (), converted, given))
    end: list[str] = []
    reasons: dict[str, list[str]] = {}
    for name, why in converted.left.items():
        reasons.setdefault(printable(why, _LONGEST), []).append(_shown(name, given[name]))
    if converted.unset:
        reasons["unset in their file (null)"] = [printable(name) for name in converted.unset]
    for why, names in reasons.items():
        end += ["", *textwrap.wrap(f"{why}:", _WIDTH, initial_indent="# ", subsequent_indent="# ")]
        for name in names:
            end += textwrap.wrap(name, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join([*head, *lines, *end]) + "\n"


def _shown(name: str, value: Any) -> str:
    """Return one of their options on one line, without secrets."""
    last = name.rpartition(".")[2]
    # OpenRLHF's option `use_wandb` may hold the API key
    last, value = ("key", value) if last == "use_wandb" and isinstance(value, str) else (last, value)
    return printable(f"{name}: {foreign.shown(redacted_options(value, last))}", _LONGEST)


def _section(tree: Mapping[str, Any], inside: tuple[str, ...], converted: Converted, given: Given) -> Iterator[str]:
    indent = "  " * len(inside)
    for key in sorted(tree, key=lambda key: (_order((*inside, key)), key != "type")):
        value, name = tree[key], ".".join((*inside, key))
        if isinstance(value, Mapping) and name not in converted.ours:
            yield f"{indent}{key}:"
            yield from _section(value, (*inside, key), converted, given)
            continue
        text = f"{key}: {yaml_tree.dump_line(value)}"
        if name in converted.filled:
            yield f"{indent}{text}  # fill in: {_NEEDED[name][1]}"
        elif (theirs := converted.of.get(name)) is not None:
            same = given[theirs] == value and type(given[theirs]) is type(value)
            yield f"{indent}{text}  # {printable(theirs) if same else _shown(theirs, given[theirs])}"
        else:
            yield f"{indent}{text}"


def _order(name: tuple[str, ...]) -> int:
    """Return the position of an option or a section in our schema."""
    dotted = ".".join(name)
    known = list(describe.options())
    return next(
        (place for place, option in enumerate(known) if option == dotted or option.startswith(f"{dotted}.")), 999
    )
