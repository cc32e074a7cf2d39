"""Reads YAML as nodes and turns them into plain values, so that the line of every option is known.

Numbers follow YAML 1.2: PyYAML's own loader reads `1e-6` as text.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

from truestep.config.describe import show
from truestep.errors import TruestepError

Name = tuple[str, ...]
"""The parts of a dotted name."""

_MOST_NODES = 10_000  # nested aliases could expand to more than memory holds
_TAG = "tag:yaml.org,2002:"
UNREADABLE = (yaml.YAMLError, ValueError, OverflowError, RecursionError)  # all that PyYAML raises on odd text


class ConfigError(TruestepError):
    """The errors of a configuration, one per line."""


def compose(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=_Loader)


def load(text: str) -> Any:
    """Read the values of another program's YAML file, without checking option names."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(top: yaml.Node) -> None:
    """Raise if a file has too many values after its aliases are expanded, or contains itself."""
    waiting, count = [top], 0
    while waiting:
        node = waiting.pop()
        count += 1
        if count > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES:,} values, its aliases written out")
        if isinstance(node, yaml.MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


def dump(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def dump_line(value: Any) -> str:
    """Write a value on one line, even if its texts contain line breaks."""
    written = yaml.dump(value, Dumper=_LineDumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return written.removesuffix("...\n").strip()


class _Loader(yaml.SafeLoader):
    """A loader with numbers of YAML 1.2 (1e-6; 010 is ten; 1:30 is text) and without dates. yes and no are booleans."""


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which this loader, or PyYAML's own, would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _LineDumper(_Dumper):
    """A dumper that escapes line breaks and other characters that cannot be printed."""


def _text_on_a_line(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar(_TAG + "str", text, style=None if text.isprintable() else '"')


_LineDumper.add_representer(str, _text_on_a_line)
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
    """Read a number. 1e4 becomes an int, so that `tokens_per_microbatch: 1e4` works."""
    plain = text.replace("_", "")
    if _NUMBERS["int"].match(text):
        integer = int(plain, 0 if plain.lstrip("+-")[:2] in ("0x", "0o") else 10)
        if integer.bit_length() > 63:
            raise ValueError("no option takes a number this large")
        return integer
    value = float(re.sub(r"\.(inf|nan)$", r"\1", plain.lower()))
    return int(value) if "e" in plain.lower() and abs(value) < 2**53 and value.is_integer() else value


class TreeReader:
    """A converter of nodes to plain values that records where each option was given."""

    def __init__(self, place: Callable[[yaml.Node], str]) -> None:
        self.place = place
        self.origins: dict[Name, str] = {}
        self._above: list[yaml.Node] = []
        self._count = 0

    def read(self, node: yaml.Node, name: Name) -> Any:
        self._count += 1
        if node in self._above or self._count > _MOST_NODES:
            problem = "contains itself" if node in self._above else "is too large, its aliases written out"
            raise ConfigError(f"{self.place(node)}: {dotted(name) or 'the file'} {problem}")
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
                raise ConfigError(f"{self.place(key)}: {dotted((*name, key.value))} is already given at {first}")
            else:
                own[key.value] = (key, value)
        values = self._merge(merged, name)
        for text, (key, value) in own.items():
            forget(self.origins, (*name, text))
            self.origins[(*name, text)] = self.place(key)
            values[text] = self.read(value, (*name, text))
        return values

    def _merge(self, nodes: list[yaml.Node], name: Name) -> dict[str, Any]:
        """Read the mappings of `<<`. The first one takes precedence, so it is read last."""
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
        raise ConfigError(f"{self.place(node)}: {dotted(name)}: cannot read {show(node.value)} as {kind}")


def forget(origins: dict[Name, str], name: Name) -> None:
    """Remove the origins of an option and of all options inside it."""
    for option in [option for option in origins if option[: len(name)] == name]:
        del origins[option]


def line_of(error: Exception, text: str) -> str:
    """Return `:LINE` of a syntax error, or an empty text if PyYAML does not know the line."""
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    line = mark.line if mark else text.count("\n", 0, position) if position is not None else None
    return "" if line is None else f":{line + 1}"


# Parts of PyYAML's messages, and plainer messages; the first match is used.
_IN_WORDS = (
    ("'\\t' that cannot start any token", "a tab begins the line or a value: use spaces"),
    ("expected <block end>", "this line's indentation is not that of the lines it belongs to"),
    ("expected ',' or '}'", "a { is not closed before this line"),
    ("expected ',' or ']'", "a [ is not closed before this line"),
    ("found unexpected end of stream", "a quotation mark is not closed"),
    ("could not find expected ':'", "a colon is missing, or the line belongs to no option"),
    (
        "mapping values are not allowed here",
        "a colon too many, or missing in the line before, or wrong indentation",
    ),
    ("found character '@'", "text that begins with @ needs quotes"),
    ("found character '`'", "text that begins with ` needs quotes"),
    ("found character '%'", "text that begins with % needs quotes"),
    ("found undefined alias", "text that begins with * needs quotes"),
)


def reason_of(error: Exception) -> str:
    """Return the reason why a text is not valid YAML."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    reasons = [getattr(error, part, None) for part in ("context", "problem")]
    said = ", ".join(reason for reason in reasons if reason) or " ".join(str(error).split("\n")[0].split())
    return next((words for part, words in _IN_WORDS if part in said), said)


def dotted(name: Name) -> str:
    """Join the parts of a name. Unusual parts are quoted, so that a key `loss.type` differs from `type` in `loss`."""
    return ".".join(part if re.fullmatch(r"[\w-]+", part) else show(part) for part in name)
