"""Makes a Config from a YAML file and overrides from the command line. Imports no torch.

Error messages say what to change, and in which line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from truestep.config import describe, foreign, presets, yaml_tree
from truestep.config.custom import CustomError, name_of
from truestep.config.schema import NEEDS_REWARD, Config, needs_reward
from truestep.config.yaml_tree import ConfigError, Name, TreeReader, dotted
from truestep.files.disks import no_file
from truestep.text import HIDDEN, hidden_options, redacted_options

COMMAND_LINE = "command line"
# Options that name a user's own code. In Python they also take the function or class itself.
TAKES_OBJECTS = frozenset(
    {
        *(
            "sampler.reward",
            "sampler.environment.class",
            "sampler.protocol",
            "evaluation.reward",
            "data.advantages",
            "data.source.function",
        ),
        *("loss.function", "optimizer.function", "logging.custom_metrics", "logging.custom_sinks"),
    }
)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read the file, apply overrides such as `--loss.type gspo`, and check everything.

    Raises ConfigError with all errors. A null checkpoint.directory becomes runs/NAME-OF-THE-CONFIG-FILE.
    """
    return load_with(path, {}, overrides)


def load_with(path: str | Path, objects: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read the file as `load_config` does. `objects`: Python values for some of its options, by dotted name."""
    source = _read_file(Path(path))
    _apply_overrides(source, list(overrides))
    if "loss.function" in objects:
        _fill_in_presets(source)
    make_room(source.data, objects)
    for name, value in objects.items():
        parts = tuple(name.split("."))
        _set(source, name, parts, _plain(value, parts))
        source.origins[parts] = "Python"
    config = _check(source)
    if needs_reward(config):
        raise ConfigError(_disagreement(NEEDS_REWARD, (), source))
    if config.checkpoint.directory is not None:
        return config
    checkpoint = config.checkpoint.model_copy(update={"directory": f"runs/{Path(path).stem}"})
    return config.model_copy(update={"checkpoint": checkpoint})


def make_room(options: dict[str, Any], objects: Mapping[str, Any]) -> None:
    """Remove the options that have no meaning once Python objects replace the configured code. `objects`: these
    objects, by option."""
    loss: Any = options.get("loss")
    sampler: Any = options.get("sampler")
    if "loss.function" in objects:
        options.pop("preset", None)  # the options of presets have been added already
        known: dict[str, Any] = {**describe.sections(), **describe.options()}
        for name in list(loss) if isinstance(loss, dict) else []:
            found = known.get(f"loss.{name}")
            if found is not None and found.variants and "custom" not in found.variants:
                del loss[name]
    if not isinstance(sampler, dict):
        return
    environment = sampler.get("environment")
    if "sampler.environment.class" in objects:
        if "sampler.reward" not in objects:
            sampler.pop("reward", None)
        if isinstance(environment, dict) and environment.get("type", "python") != "python":
            del sampler["environment"]
    elif "sampler.reward" in objects and environment is not None:
        for name in ("environment", "max_turns", "max_episode_tokens", "episode_timeout"):
            sampler.pop(name, None)


def _check(source: "_Source") -> Config:
    _fill_in_presets(source)
    try:
        return Config.model_validate(source.data, strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_named_problems(error, source))) from None


def check_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Check options. Return the error messages, and the option or section that each is about."""
    source = _Source("options", dict(options), dict.fromkeys(_names(options, ()), "options"))
    try:
        _fill_in_presets(source)
        config = Config.model_validate(source.data, strict=True)
    except ValidationError as error:
        return _named_problems(error, source)
    except ConfigError as error:
        return {str(error): "preset"}
    return {NEEDS_REWARD: "sampler"} if needs_reward(config) else {}


def _named_problems(error: ValidationError, source: "_Source") -> dict[str, str]:
    return {
        problem: dotted(describe.locate(detail["loc"])[0])
        for detail in error.errors()
        for problem in _problems(detail, source)
    }


def config_of(options: Mapping[str, Any]) -> Config:
    """Make a configuration from options given in Python, as `Config(model={...})`, and check it.

    A pathlib.Path may stand for a path, a tuple for a list, and an object for the name of the user's code.
    """
    plain = {name: _plain(value, (name,)) for name, value in options.items()}
    return _check(_Source("Config", plain, dict.fromkeys(_names(plain, ()), "Config")))


type(Config).check = staticmethod(config_of)


def _names(options: Mapping[str, Any], inside: Name) -> Iterator[Name]:
    for name, value in options.items():
        yield (*inside, name)
        if isinstance(value, Mapping):
            yield from _names(value, (*inside, name))


def takes_objects(name: Name) -> bool:
    """Return whether an option names a user's own code. Sets of held-out prompts have such options too."""
    of_set = name[:2] == ("evaluation", "sets") and name[3:] in (("reward",), ("environment", "class"))
    return of_set or dotted(name) in TAKES_OBJECTS


def _plain(value: Any, name: Name) -> Any:
    """Convert a Python value to the types of YAML: sections to mappings, paths and functions to text."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(inner): _plain(item, (*name, str(inner))) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if takes_objects(name) and value is not None and not isinstance(value, str):
        try:
            return name_of(dotted(name), value)
        except CustomError as error:
            raise ConfigError(str(error)) from None
    return value


def dump_config(config: Config, *, without_secrets: bool = False) -> str:
    """Write all options as YAML, with defaults. Loading it gives an equal Config, except for secrets left out."""
    options = config.model_dump()
    return yaml_tree.dump(redacted_options(options) if without_secrets else options)


def check_secrets(config: Config, source: Path) -> None:
    """Raise if an option is *** in place of a secret, as in the config.yaml that a run writes."""
    if hidden := hidden_options(config.model_dump()):
        raise ConfigError(
            f"{source}: {', '.join(hidden)}: {HIDDEN} stands where a secret was left out, as in the config.yaml of a "
            "run. Give the option with its secret, in your own file or on the command line"
        )


@dataclass
class _Source:
    """The options that were given, and where each was given: `file:line` or `command line`."""

    file: str
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Name, str] = field(default_factory=dict)

    def where(self, name: Name) -> str:
        """Return where an option was given, or else where the nearest section around it was given."""
        while name:
            inside = [origin for option, origin in self.origins.items() if option[: len(name)] == name]
            if inside:
                return self.origins.get(name, inside[0])
            name = name[:-1]
        return self.file

    def value(self, name: Name) -> Any:
        value: Any = self.data
        for part in name:
            value = value.get(part) if isinstance(value, dict) else None
        return value


def _read_file(path: Path) -> _Source:
    if (kind := no_file(path)) is not None:
        raise ConfigError(f"{path}: cannot be read: it is {kind}, not a file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reader = TreeReader(lambda node: f"{path}:{node.start_mark.line + 1}")
    try:
        node = yaml_tree.compose(text)
        data = None if node is None else reader.read(node, ())
    except yaml_tree.UNREADABLE as error:
        raise ConfigError(
            f"{path}{yaml_tree.line_of(error, text)}: not valid YAML: {yaml_tree.reason_of(error)}"
        ) from None
    if data is None:
        raise ConfigError(f"{path}: the file is empty: model.path is required")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}:1: the file must be sections of options (model:, loss:), not {describe.show(data)}")
    return _Source(str(path), data, reader.origins)


def _apply_overrides(source: _Source, tokens: list[str]) -> None:
    seen: dict[Name, str] = {}
    while tokens:
        token = tokens.pop(0)
        if (named := re.match(r"\+{0,2}([\w.]+)=", token)) is not None and not _is_option(named[1]):
            token = f"--{token.lstrip('+')}"  # Hydra's syntax: report it with all other errors
        flag, equals, text = token.partition("=")
        name = tuple(flag.removeprefix("--").replace("-", "_").split("."))
        if not flag.startswith("--") or not all(re.fullmatch(r"\w+", part) for part in name):
            raise ConfigError(f"{COMMAND_LINE}: {describe.show(token)} is not an override: write {_as_override(token)}")
        _refuse_repeat(flag, name, seen)
        follows = not equals and tokens and not tokens[0].startswith("--")
        value, origins = _override_value(flag, name, text if equals else tokens.pop(0) if follows else None)
        _set(source, flag, name, value)
        yaml_tree.forget(source.origins, name)
        source.origins |= {name: COMMAND_LINE} | origins


def _as_override(token: str) -> str:
    name, equals, value = token.lstrip("+~").partition("=")
    return f"--{name} {value}" if equals and _is_option(name) else "--section.option value"


def _is_option(name: str) -> bool:
    return name in describe.options() or name in describe.sections()


def _refuse_repeat(flag: str, name: Name, seen: dict[Name, str]) -> None:
    for earlier, earlier_flag in seen.items():
        if name == earlier:
            raise ConfigError(f"{COMMAND_LINE}: {flag} is given twice")
        if name == earlier[: len(name)] or earlier == name[: len(earlier)]:
            raise ConfigError(f"{COMMAND_LINE}: {earlier_flag} and {flag} are both given: one is a part of the other")
    seen[name] = flag


def _override_value(flag: str, name: Name, text: str | None) -> tuple[Any, dict[Name, str]]:
    """Return an override's value, and the origins of the options in it if it is a whole section."""
    option = describe.options().get(dotted(name))
    if text is None and (option.is_bool if option else dotted(name) not in describe.sections()):
        return True, {}  # also for an unknown name, which is reported as unknown later
    if text is not None and option is not None and option.takes_text and not _is_yaml(text):
        return text, {}
    if not text:
        raise ConfigError(f"{COMMAND_LINE}: {flag} needs a value{f': {option.allowed}' if option else ''}")
    reader = TreeReader(lambda node: COMMAND_LINE)
    try:
        node = yaml_tree.compose(text)
        value = None if node is None else reader.read(node, name)
    except yaml_tree.UNREADABLE as error:
        raise ConfigError(
            f"{COMMAND_LINE}: {flag} {describe.show(text)}: not valid YAML: {yaml_tree.reason_of(error)}"
        ) from None
    return value, reader.origins


def _is_yaml(text: str) -> bool:
    """Return whether the value of an option that takes text is parsed as YAML. `*.jsonl`, `12` and `a: b` are not."""
    return text in ("null", "~") or text[:1] in ("[", "{", "'", '"')


def _set(source: _Source, flag: str, name: Name, value: Any) -> None:
    section = source.data
    for depth, part in enumerate(name[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
        if not isinstance(section[part], dict):
            outer = f"{dotted(name[:depth])} is {describe.show(section[part])}, not a section"
            raise ConfigError(f"{COMMAND_LINE}: {flag} cannot be set: {source.where(name[:depth])}: {outer}")
        section = section[part]
    section[name[-1]] = value


def _fill_in_presets(source: _Source) -> None:
    """Add the options of presets, and record for each its preset and the place that names it."""
    try:
        filled = presets.fill(source.data)
    except presets.PresetError as error:
        raise ConfigError(_disagreement(str(error), (), source)) from None
    where = source.where(("preset",))
    source.origins |= {name: f"preset {preset} ({where})" for name, preset in filled.items()}


def _problems(detail: ErrorDetails, source: _Source) -> list[str]:
    """Turn one of pydantic's errors into messages: one for each required option if a section is missing."""
    name, variant = describe.locate(detail["loc"])
    where = source.where(name)
    cause = detail.get("ctx", {}).get("error")
    if cause is not None:
        return [_disagreement(str(cause), name, source)]
    if (beyond := _beyond(detail["loc"], name, source)) is not None:
        return [f"{where}: {dotted(beyond)}: {detail['msg'][0].lower()}{detail['msg'][1:]}"]
    if detail["type"] == "missing":
        required = [option for option in describe.options().values() if option.default == describe.REQUIRED]
        inside = [option.name for option in required if option.section == dotted(name)]
        return [f"{where}: {missing} is required" for missing in inside or [dotted(name)]]
    if detail["type"] == "extra_forbidden":
        return _unknowns(name, variant, source)
    if detail["type"].startswith("union_tag") and isinstance(source.value(name), dict):
        name = (*name, "type")
    return [f"{source.where(name)}: {describe.explain_wrong(dotted(name), source.value(name))}"]


def _beyond(location: tuple[int | str, ...], name: Name, source: _Source) -> Name | None:
    """Return the name of a wrong value inside an option whose value is a mapping with the user's own keys, such as
    data.fields; None for other options."""
    value = source.value(name)
    if dotted(name) not in describe.options() or not isinstance(value, dict) or len(location) <= len(name):
        return None
    inside = tuple(str(part) for part in location[len(name) :] if part != "[key]")
    return (*name, *inside) if inside[0] in value else None


def _unknowns(name: Name, variant: str, source: _Source) -> list[str]:
    """Return the messages for an unknown option, or for each option of another trainer's section."""
    value = source.value(name)
    inside = dict(foreign.leaves(value, name)) if isinstance(value, dict) else {}
    known = [option for option in inside if foreign.explain(option) is not None]
    if not known or foreign.is_section(name):
        return [f"{source.where(name)}: {_unknown(name, variant, source)}"]
    return [
        f"{source.where(option)}: {dotted(option)} is unknown: "
        + (foreign.explain(option, given, source.data) or f"truestep has no section {dotted(name)}")
        for option, given in inside.items()
    ]


def _unknown(name: Name, variant: str, source: _Source) -> str:
    full, section = dotted(name), dotted(name[:-1])
    option = describe.options().get(full) or describe.sections().get(full)
    if option is None:
        reason = foreign.explain(name, source.value(name), source.data) or describe.explain_unknown(name, variant)
        return f"{full} is unknown: {reason}"
    have = "has" if len(option.variants) == 1 else "have"
    chosen = source.origins.get((*name[:-1], "type"))
    by = f"set at {chosen}" if chosen not in (None, COMMAND_LINE) else f"from the {chosen}" if chosen else "the default"
    owners = describe.join_words(option.variants, "and")
    return f"{full} is not an option of {section}.type: {variant} ({by}); {owners} {have} it"


def _disagreement(message: str, name: Name, source: _Source) -> str:
    """Add the places where the options of a contradiction were given to its message."""
    optional = {section.name for section in describe.sections().values() if section.optional}
    places: dict[str, None] = {}
    for word in re.findall(r"\w+(?:\.\w+)*", message):
        mentioned = (*name, *word.split("."))
        # a single word such as `data` is more likely English than the section
        if mentioned in source.origins and (len(mentioned) > 1 or word in optional | {"preset"}):
            places[source.origins[mentioned]] = None
    prefix = f"{dotted(name)}: " if name else ""
    return f"{', '.join(places) or source.where(name)}: {prefix}{message}"
