"""One YAML file and the command line's overrides become a Config, or an error that says what to change and where.

YAML is read as nodes, not as values, so that the line of every option is known. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from truestep.config.describe import (
    REQUIRED,
    explain_unknown,
    explain_wrong,
    join_words,
    locate,
    options,
    sections,
    show,
)
from truestep.config.schema import Config
from truestep.errors import TruestepError

Name = tuple[str, ...]
"""A dotted name in parts."""

COMMAND_LINE = "command line"
_MOST_NODES = 10_000  # aliases of aliases can ask for more than memory holds
_TAG = "tag:yaml.org,2002:"
_UNREADABLE = (yaml.YAMLError, ValueError, OverflowError, RecursionError)  # all that PyYAML raises on odd text


class ConfigError(TruestepError):
    """What is wrong with the configuration: a line an error."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, apply overrides such as `--loss.type gspo`, and check everything.

    Raises ConfigError with all that is wrong. A null checkpoint.directory becomes runs/NAME-OF-THE-CONFIG-FILE.
    """
    source = _read_file(Path(path))
    _apply_overrides(source, list(overrides))
    try:
        config = Config.model_validate(source.data, strict=True)
    except ValidationError as error:
        problems = dict.fromkeys(problem for detail in error.errors() for problem in _problems(detail, source))
        raise ConfigError("\n".join(problems)) from None
    if config.checkpoint.directory is not None:
        return config
    checkpoint = config.checkpoint.model_copy(update={"directory": f"runs/{Path(path).stem}"})
    return config.model_copy(update={"checkpoint": checkpoint})


def dump_config(config: Config) -> str:
    """YAML of every option, defaults included; it loads back to an equal Config."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False)


# YAML to plain values


class _Loader(yaml.SafeLoader):
    """Numbers as in YAML 1.2 (1e-6 is one, 010 is ten, 1:30 is text), no dates; yes and no stay true and false."""


class _Dumper(yaml.SafeDumper):
    """Quotes whatever text the loader, or another program's, would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NUMBERS = {
    "int": re.compile(r"^[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"),
    "float": re.compile(
        r"^[-+]?(?:(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|\.inf|\.Inf|\.INF)$|^\.(?:nan|NaN|NAN)$"
    ),
}
_KEPT = {_TAG + kind for kind in ("bool", "null", "merge")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(_TAG + _kind, _pattern, list("-+.0123456789"))
    _Dumper.add_implicit_resolver(_TAG + _kind, _pattern, list("-+.0123456789"))


def _number(text: str) -> int | float:
    """1e4 counts as the whole number it is, so that `tokens_per_microbatch: 1e4` works."""
    plain = text.replace("_", "")
    if _NUMBERS["int"].match(text):
        whole = int(plain, 0 if plain.lstrip("+-")[:2] in ("0x", "0o") else 10)
        if whole.bit_length() > 63:
            raise ValueError("no option takes a number this large")
        return whole
    value = float(re.sub(r"\.(inf|nan)$", r"\1", plain.lower()))
    return int(value) if "e" in plain.lower() and abs(value) < 2**53 and value.is_integer() else value


@dataclass
class _Source:
    """Options as given, and where: `file:line` or `command line`."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Name, str] = field(default_factory=dict)

    def where(self, name: Name) -> str:
        """Where the option is, or the nearest section around it that was given (as a whole, or something in it)."""
        while name:
            inside = [origin for given, origin in self.origins.items() if given[: len(name)] == name]
            if inside:
                return self.origins.get(name, inside[0])
            name = name[:-1]
        return self.file

    def value(self, name: Name) -> Any:
        value: Any = self.data
        for part in name:
            value = value.get(part) if isinstance(value, dict) else None
        return value


class _TreeReader:
    """Turns nodes into plain values and notes where each option was given."""

    def __init__(self, place: Callable[[yaml.Node], str]) -> None:
        self.place = place
        self.origins: dict[Name, str] = {}
        self._above: list[yaml.Node] = []
        self._count = 0

    def read(self, node: yaml.Node, name: Name) -> Any:
        self._count += 1
        if node in self._above or self._count > _MOST_NODES:
            problem = "contains itself" if node in self._above else "is too large, its aliases written out"
            raise ConfigError(f"{self.place(node)}: {_dotted(name) or 'the file'} {problem}")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, name)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise ConfigError(f"{self.place(node)}: the tag {node.tag!r} is not supported")
        self._above.append(node)
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, name)
        else:
            value = [self.read(item, name) for item in node.value]
        self._above.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, name: Name) -> dict[str, Any]:
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{self.place(key)}: an option's name must be text, not a list or a mapping")
            if key.tag == _TAG + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif key.value in own:
                first = self.place(own[key.value][0])
                raise ConfigError(f"{self.place(key)}: {_dotted((*name, key.value))} is already given at {first}")
            else:
                own[key.value] = (key, value)
        values = self._merge(merged, name)
        for text, (key, value) in own.items():
            _forget(self.origins, (*name, text))
            self.origins[(*name, text)] = self.place(key)
            values[text] = self.read(value, (*name, text))
        return values

    def _merge(self, nodes: list[yaml.Node], name: Name) -> dict[str, Any]:
        """What `<<` brings in. The first of several mappings wins, so it is read last."""
        values: dict[str, Any] = {}
        for node in reversed(nodes):
            if not isinstance(node, yaml.MappingNode):
                raise ConfigError(f"{self.place(node)}: << takes a mapping, or a list of mappings")
            values.update(self.read(node, name))
        return values

    def _scalar(self, node: yaml.ScalarNode, name: Name) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind in ("str", "null"):
            return node.value if kind == "str" else None
        try:
            if kind in ("int", "float"):
                return _number(node.value)
            if kind == "bool":
                return yaml.SafeLoader.bool_values[node.value.lower()]
        except (ValueError, KeyError):
            pass  # reported below, like an unknown tag
        raise ConfigError(f"{self.place(node)}: {_dotted(name)}: cannot read {show(node.value)} as {kind}")


def _forget(origins: dict[Name, str], name: Name) -> None:
    for given in [given for given in origins if given[: len(name)] == name]:
        del origins[given]


def _read_file(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = _TreeReader(lambda node: f"{path}:{node.start_mark.line + 1}")
    try:
        node = yaml.compose(text, Loader=_Loader)
        data = None if node is None else reader.read(node, ())
    except _UNREADABLE as error:
        raise ConfigError(f"{path}{_line(error, text)}: not valid YAML: {_reason(error)}") from None
    if data is None:
        raise ConfigError(f"{path}: the file is empty: model.path is required")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: the file must be sections of options (model:, loss:), not {show(data)}")
    return _Source(str(path), data, reader.origins)


def _line(error: Exception, text: str) -> str:
    """`:line` of a syntax error, where PyYAML knows it."""
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    line = mark.line if mark else text.count("\n", 0, position) if position is not None else None
    return "" if line is None else f":{line + 1}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    reasons = [getattr(error, part, None) for part in ("context", "problem")]
    return ", ".join(reason for reason in reasons if reason) or " ".join(str(error).split("\n")[0].split())


# The command line


def _apply_overrides(source: _Source, tokens: list[str]) -> None:
    seen: dict[Name, str] = {}
    while tokens:
        token = tokens.pop(0)
        flag, equals, text = token.partition("=")
        name = tuple(flag.removeprefix("--").replace("-", "_").split("."))
        if not flag.startswith("--") or not all(re.fullmatch(r"\w+", part) for part in name):
            raise ConfigError(f"{COMMAND_LINE}: {show(token)} is not an override: write --section.option value")
        _refuse_repeat(flag, name, seen)
        follows = not equals and tokens and not tokens[0].startswith("--")
        value, origins = _override_value(flag, name, text if equals else tokens.pop(0) if follows else None)
        _set(source, flag, name, value)
        _forget(source.origins, name)
        source.origins |= {name: COMMAND_LINE} | origins


def _refuse_repeat(flag: str, name: Name, seen: dict[Name, str]) -> None:
    for earlier, earlier_flag in seen.items():
        if name == earlier:
            raise ConfigError(f"{COMMAND_LINE}: {flag} is given twice")
        if name == earlier[: len(name)] or earlier == name[: len(earlier)]:
            raise ConfigError(f"{COMMAND_LINE}: {earlier_flag} and {flag} are both given: one is a part of the other")
    seen[name] = flag


def _override_value(flag: str, name: Name, text: str | None) -> tuple[Any, dict[Name, str]]:
    """The value, and the origins of options inside it where it is a whole section."""
    option = options().get(_dotted(name))
    if text is None and (option.is_bool if option else _dotted(name) not in sections()):
        return True, {}  # an unknown name is better reported as unknown than as a flag without value
    if text is not None and option is not None and option.takes_text and not _is_yaml(text):
        return text, {}
    if not text:
        raise ConfigError(f"{COMMAND_LINE}: {flag} needs a value{f': {option.allowed}' if option else ''}")
    reader = _TreeReader(lambda node: COMMAND_LINE)
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else reader.read(node, name)
    except _UNREADABLE as error:
        raise ConfigError(f"{COMMAND_LINE}: {flag} {show(text)}: not valid YAML: {_reason(error)}") from None
    return value, reader.origins


def _is_yaml(text: str) -> bool:
    """For an option that takes text: `*.jsonl`, `12` and `a: b` are the text itself, not YAML."""
    return text in ("null", "~") or text[:1] in ("[", "{", "'", '"')


def _set(source: _Source, flag: str, name: Name, value: Any) -> None:
    section = source.data
    for depth, part in enumerate(name[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
        if not isinstance(section[part], dict):
            outer = f"{_dotted(name[:depth])} is {show(section[part])}, not a section"
            raise ConfigError(f"{COMMAND_LINE}: {flag} cannot be set: {source.where(name[:depth])}: {outer}")
        section = section[part]
    section[name[-1]] = value


# Errors


def _problems(detail: ErrorDetails, source: _Source) -> list[str]:
    """One of pydantic's errors in the words of the file; several where a section is missing."""
    name, variant = locate(detail["loc"])
    where = source.where(name)
    cause = detail.get("ctx", {}).get("error")
    if cause is not None:
        return [_disagreement(str(cause), name, source)]
    if detail["type"] == "missing":
        required = [option for option in options().values() if option.default == REQUIRED]
        inside = [option.name for option in required if option.section == _dotted(name)]
        return [f"{where}: {missing} is required" for missing in inside or [_dotted(name)]]
    if detail["type"] == "extra_forbidden":
        return [f"{where}: {_unknown(name, variant, source)}"]
    if detail["type"].startswith("union_tag") and isinstance(source.value(name), dict):
        name = (*name, "type")
    return [f"{source.where(name)}: {explain_wrong(_dotted(name), source.value(name))}"]


def _unknown(name: Name, variant: str, source: _Source) -> str:
    dotted, section = _dotted(name), _dotted(name[:-1])
    option = options().get(dotted)
    if option is None:
        return f"{dotted} is unknown: {explain_unknown(name, variant)}"
    have = "has" if len(option.variants) == 1 else "have"
    chosen = source.origins.get((*name[:-1], "type"))
    by = f"set at {chosen}" if chosen not in (None, COMMAND_LINE) else f"from the {chosen}" if chosen else "the default"
    owners = join_words(option.variants, "and")
    return f"{dotted} is not an option of {section}.type: {variant} ({by}); {owners} {have} it"


def _disagreement(message: str, name: Name, source: _Source) -> str:
    """A contradiction, at every place where an option that it names was given."""
    optional = {section.name for section in sections().values() if section.optional}
    places: dict[str, None] = {}
    for word in re.findall(r"\w+(?:\.\w+)*", message):
        mentioned = (*name, *word.split("."))
        # a single word such as `data` is more likely English than the section
        if mentioned in source.origins and (len(mentioned) > 1 or word in optional):
            places[source.origins[mentioned]] = None
    prefix = f"{_dotted(name)}: " if name else ""
    return f"{', '.join(places) or source.where(name)}: {prefix}{message}"


def _dotted(name: Name) -> str:
    """Quotes what could not be a name, so that a key `loss.type` is told from `type` in `loss`."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else show(part) for part in name)
