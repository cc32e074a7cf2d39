"""Reads all options with their types, defaults and meanings from the schema, for `--help`, docs and error messages.

`python -m truestep.config.describe > docs/configuration.md` writes the reference, and `python -m
truestep.config.describe everyday > docs/options.md` the options that matter. Imports no torch.
"""

import json
import re
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from truestep.config.losses import LOSSES_OF_OTHERS
from truestep.config.schema import EVERYDAY, Config

ALL = "all"  # given in place of a section's name: all sections
TEXT, BOOL, NULL, REQUIRED = "text", "true | false", "null", "required"
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Option:
    """One option of the file. Example: `loss.dual_clip`, `float > 1 | null`, `null`, ..., ("grpo", "gspo")."""

    name: str
    type: str
    default: str
    meaning: str
    variants: tuple[str, ...] = ()
    """The values of the section's `type` that have this option; empty if all of them have it."""

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def choices(self) -> list[str]:
        return self.type.split(" | ")

    @property
    def allowed(self) -> str:
        return join_words(self.choices, "or")

    @property
    def takes_text(self) -> bool:
        return TEXT in self.choices

    @property
    def is_bool(self) -> bool:
        return "false" in self.choices


@dataclass(frozen=True)
class SectionInfo:
    """A mapping in the file that holds options."""

    name: str
    meaning: str
    optional: bool
    """True if the section's default is null: it is absent unless the file has it."""
    variants: tuple[str, ...] = ()
    """The values of the outer section's `type` that have this section; empty if all of them have it."""


Models = dict[str, type[BaseModel]]
"""A section's variants by their value of `type`; a section without variants has the single key ''."""


def section_models(field: FieldInfo) -> Models:
    """Return the section models in a field's type; {} for a plain option."""
    return dict(_models_in(field.annotation, ""))


def _models_in(annotation: Any, tag: str) -> Iterator[tuple[str, type[BaseModel]]]:
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        tags = [extra.tag for extra in arguments[1:] if isinstance(extra, Tag)]
        yield from _models_in(arguments[0], tags[0] if tags else tag)
    elif _is_union(annotation):
        for member in arguments:
            yield from _models_in(member, tag)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield tag, annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


@cache
def _walk_schema() -> tuple[Option | SectionInfo, ...]:
    return tuple(_walk({"": Config}, ""))


def _walk(models: Models, prefix: str) -> Iterator[Option | SectionInfo]:
    names = dict.fromkeys(name for model in models.values() for name in model.model_fields)
    for name in sorted(names, key=lambda name: name != "type"):  # stable: only `type` moves, to the front
        holders = {tag: model for tag, model in models.items() if name in model.model_fields}
        field = next(iter(holders.values())).model_fields[name]
        below = section_models(field)
        if below:
            variants = () if len(holders) == len(models) else tuple(holders)
            yield SectionInfo(prefix + name, _meaning(name, holders), field.default is None, variants)
            yield from _walk(below, f"{prefix}{name}.")
        else:
            yield _option(prefix + name, name, holders, models)


def list_options() -> list[Option]:
    """List all options in the order of the schema, one for each dotted name."""
    return [item for item in _walk_schema() if isinstance(item, Option)]


def options() -> dict[str, Option]:
    return {option.name: option for option in list_options()}


def sections() -> dict[str, SectionInfo]:
    return {item.name: item for item in _walk_schema() if isinstance(item, SectionInfo)}


def _option(dotted: str, name: str, holders: Models, models: Models) -> Option:
    fields = {tag: model.model_fields[name] for tag, model in holders.items()}
    texts = dict.fromkeys(part for field in fields.values() for part in _type_texts(field.annotation, field.metadata))
    variants = () if len(holders) == len(models) else tuple(holders)
    return Option(dotted, " | ".join(texts), _default(name, fields), _meaning(name, holders), variants)


def _default(name: str, fields: dict[str, FieldInfo]) -> str:
    """Return the first variant's default, with those of other variants in parentheses: `0.2 (gspo: 0.0003)`."""
    defaults = {tag: REQUIRED if field.is_required() else show_value(field.default) for tag, field in fields.items()}
    if name == "type":  # without a type, the variant whose own `type` has a default is taken
        return next((default for default in defaults.values() if default != REQUIRED), REQUIRED)
    first = next(iter(defaults.values()))
    different = [f"{tag}: {default}" for tag, default in defaults.items() if default != first]
    return f"{first} ({', '.join(different)})" if different else first


def show_value(value: Any) -> str:
    """Write a plain value as in YAML: null, true, 3e-4."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return re.sub(r"e([+-])0+(?=\d)", r"e\1", repr(value))
    return str(value)


def show(value: Any) -> str:
    """Write a value as in YAML, shortened to one line."""
    if isinstance(value, dict):
        return "a section of options"
    if isinstance(value, list):
        plain = not any(isinstance(item, (dict, list)) for item in value)
        text = f"[{', '.join(map(show, value))}]" if plain else "a list"
    else:
        text = repr(value) if isinstance(value, str) else show_value(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meaning(name: str, holders: Models) -> str:
    """Return the attribute's docstring. If variants have different ones, each gets a line."""
    texts = {tag: _description(model, name) for tag, model in holders.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{tag}: {text}" for tag, text in texts.items() if text)


def _description(model: type[BaseModel], name: str) -> str:
    """Return a field's docstring, or that of a parent class if the field is redeclared without one."""
    for parent in model.__mro__:
        field = getattr(parent, "__pydantic_fields__", {}).get(name)
        if field is not None and field.description:
            return " ".join(field.description.split())
    return ""


def _type_texts(annotation: Any, metadata: Iterable[Any] = ()) -> Iterator[str]:
    """Yield the alternatives of a type as text. Example: Annotated[int, Field(ge=1)] | None: `int >= 1`, `null`."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        yield from _type_texts(arguments[0], [*metadata, *arguments[1:]])
    elif _is_union(annotation):
        for member in arguments:
            yield from _type_texts(member, metadata)
    elif get_origin(annotation) is Literal:
        yield from (show_value(choice) for choice in arguments)
    elif get_origin(annotation) is dict:
        yield "mapping"
    elif get_origin(annotation) is list:
        yield f"list of {' or '.join(_type_texts(arguments[0]))}"
    elif annotation in (int, float):
        bounds = " and ".join(_bounds(metadata))
        yield f"{annotation.__name__} {bounds}".rstrip()
    else:
        yield {str: TEXT, bool: BOOL, type(None): NULL}[annotation]


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        elif isinstance(item, (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)):
            word = type(item).__name__.lower()
            yield f"{_BOUNDS[word]} {show_value(getattr(item, word))}"


def join_words(words: Sequence[str], last: str) -> str:
    """Join words as a sentence lists them. Example: `text, list of text or null`."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def locate(location: Sequence[str | int]) -> tuple[tuple[str, ...], str]:
    """Convert pydantic's location of an error to the parts of the option's name and the variant of its section.

    Example: ("loss", "grpo", "ratio_cap") becomes ("loss", "ratio_cap") and `grpo`. Pydantic puts a variant's tag in
    the middle, and the alternatives of a plain option's type at the end.
    """
    models: Models = {"": Config}
    name: list[str] = []
    variant = ""
    for part in map(str, location):
        if len(models) > 1:
            models, variant = {part: models[part]}, part
        elif models:
            name.append(part)
            field = next(iter(models.values())).model_fields.get(part)
            models = section_models(field) if field else {}
            variant = "" if models else variant
    return tuple(name), variant


_NEAR, _VERY_NEAR = 0.65, 0.85  # similarity of suggested names, in the same section and in others


def explain_unknown(name: Sequence[str], variant: str = "") -> str:
    """Return a suggestion for an unknown name.

    In this order: a similar name in the same section, the same name in another section, a similar name in another
    section, or a list of all options of the section.
    """
    section, leaf = ".".join(name[:-1]), name[-1]
    if (opened := re.match(r"(\w+)\s*[{\[]", leaf)) is not None:
        return f"a colon is missing after {opened[1]}"
    split = {item.name: item.name.rpartition(".") for item in _walk_schema()}
    if "." in leaf and leaf in split:
        return f"in a file it is {split[leaf][2]} under {split[leaf][0]}"
    other_variants = {option.name for option in list_options() if option.variants and variant not in option.variants}
    siblings = [last for full, (parent, _, last) in split.items() if parent == section and full not in other_variants]
    if near := get_close_matches(leaf, siblings, n=1, cutoff=_NEAR):
        return f"did you mean {section}{'.' if section else ''}{near[0]}?"
    if same := [full for full, (_, _, last) in split.items() if last == leaf]:
        homes = [f"section {split[full][0]}" if split[full][0] else "no section" for full in same]
        return f"option '{leaf}' is in {join_words(homes, 'and')}: {', '.join(same)}"
    if near := get_close_matches(leaf, [last for _, _, last in split.values()], n=1, cutoff=_VERY_NEAR):
        return f"did you mean {join_words([full for full in split if split[full][2] == near[0]], 'or')}?"
    return f"{f'section {section}' if section else 'the file'} has {', '.join(siblings)}"


# Values as other programs write them.
_OF_TYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "torch.bfloat16": "bfloat16"}
_OF_OTHERS = _OF_TYPES | LOSSES_OF_OTHERS


def explain_wrong(name: str, value: Any) -> str:
    """Return a message about a wrong value of an option or a section, with the values that are allowed."""
    option = options().get(name)
    if option is None:
        null = " or null" if name in sections() and sections()[name].optional else ""
        return f"{name} must be a section of options{null}, not {show(value)}"
    near = get_close_matches(value, option.choices, n=1) if isinstance(value, str) else []
    if isinstance(value, str) and _OF_OTHERS.get(value) in option.choices:
        near = [_OF_OTHERS[value]]
    quotes = option.takes_text and isinstance(value, (int, float))
    hint = f"; did you mean {near[0]}?" if near else "; put it in quotes" if quotes else ""
    return f"{name} must be {option.allowed}, not {show(value)}{hint}"


def _grouped() -> list[tuple[SectionInfo | None, list[Option]]]:
    """Group the options by section. Options outside of sections come first, with None."""
    found: dict[str, SectionInfo | None] = {"": None, **sections()}
    return [(info, [option for option in list_options() if option.section == name]) for name, info in found.items()]


def everyday() -> list[Option]:
    """List the options that most runs set."""
    return [options()[name] for name in EVERYDAY]


def in_short(option: Option) -> str:
    """Return the first sentence of an option's meaning. For an option `type`: that of its section, and the types."""
    of_types = option.name.endswith(".type")
    text = sections()[option.section].meaning if of_types else option.meaning
    sentence = text.partition("\n")[0].partition(". ")[0].rstrip(".") + "."
    return f"{sentence} {join_words(option.choices, 'or')}." if of_types else sentence


def render_everyday() -> RenderableType:
    """Return the options that matter for `truestep train --help`, and the names of all sections."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for option in everyday():
        default = f"[{REQUIRED}]" if option.default == REQUIRED else f"[{option.default}]"
        meaning = Text.assemble(in_short(option), " ", (default, "yellow"))
        table.add_row(Text(f"--{option.name}", "bold cyan"), meaning)
    names = Text(f"\nSections: {', '.join(sections())}, and {_title(None)} for the options of no section.")
    return Group(table, names)


def render_options(about: str) -> RenderableType | None:
    """Return options with name, type, default and meaning for `--help ABOUT`; None if nothing matches. `about`: a
    section (shown with the sections in it), a part of option names, or `all`."""
    wanted = about.removeprefix("--").lower()

    def asked_for(section: SectionInfo | None, option: Option) -> bool:
        within = f"{_title(section)}."
        return wanted == ALL or within.startswith(f"{wanted}.") or (wanted not in sections() and wanted in option.name)

    parts: list[RenderableType] = []
    for section, every in _grouped():
        options = [option for option in every if asked_for(section, option)]
        if not options:
            continue
        title, note = (_title(section), "bold underline"), (f"  {_section_note(section)}", "italic")
        parts.append(Text.assemble("\n", title, note, overflow="fold"))
        for option in options:
            heading = Text.assemble((f"--{option.name}", "bold cyan"), "  ", (option.type, "green"), overflow="fold")
            shown = option.default if option.default == REQUIRED else f"default: {option.default}"
            heading.append(f"  [{shown}]", "yellow")
            if option.variants:
                heading.append(f"  (type: {', '.join(option.variants)})", "magenta")
            parts.append(Padding(heading, (0, 0, 0, 2)))
            parts.append(Padding(Text(option.meaning), (0, 0, 0, 6)))
    return Group(*parts) if parts else None


def _title(section: SectionInfo | None) -> str:
    return section.name if section else "run"


def _section_note(section: SectionInfo | None) -> str:
    if section is None:
        return "Options of no section."
    return section.meaning + (" Absent unless given." if section.optional else "")


_MARKDOWN_HEAD = """# Configuration

<!-- Written by `python -m truestep.config.describe > docs/configuration.md`; a test compares the two. -->

One YAML file, and overrides after it on the command line:

```
truestep train run.yaml --schedule.steps 200 --deterministic
```

An override replaces what the file says: `--section.option value` or `--section.option=value`. The value is read as
YAML (`null`, `true`, `1e-6`, `'[a.jsonl, b.jsonl]'`); an option that is true or false may stand without a value;
`--evaluation null` removes a whole section. Unknown and contradictory options are errors. [glossary.md](glossary.md)
explains the words, and [options.md](options.md) has the options that matter."""


def markdown_reference() -> str:
    """Return the text of docs/configuration.md."""
    lines = [_MARKDOWN_HEAD]
    for section, options in _grouped():
        title, note = (f"`{section.name}`", _section_note(section)) if section else ("Options of no section", "")
        lines += ["", f"## {title}", "", *([textwrap.fill(_cell(note), 120), ""] if note else [])]
        lines += ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
        lines += [_markdown_row(option) for option in options]
    return "\n".join(lines) + "\n"


_EVERYDAY_HEAD = """# The options that matter

<!-- Written by `python -m truestep.config.describe everyday > docs/options.md`; a test compares the two. -->

Most runs set some of these. `truestep train --help` shows them too, `truestep train --help SECTION` a
whole section, and `--help-all` every option. [configuration.md](configuration.md) has all of them with their types, and
how to write them."""


def markdown_everyday() -> str:
    """Return the text of docs/options.md."""
    lines = [_EVERYDAY_HEAD, "", "| option | default | meaning |", "| --- | --- | --- |"]
    for option in everyday():
        default = REQUIRED if option.default == REQUIRED else f"`{option.default}`"
        cells = [f"`{option.name}`", default, in_short(option)]
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _markdown_row(option: Option) -> str:
    default = REQUIRED if option.default == REQUIRED else f"`{option.default}`"
    only = f" *(type: {', '.join(option.variants)})*" if option.variants else ""
    cells = [f"`{option.name}`", f"`{option.type}`", default, option.meaning + only]
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    """Escape text for a table cell: bars and new lines would end the cell, and `<` outside of code would be markup."""
    escaped = re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text.replace("|", "\\|"))
    return escaped.replace("\n", "<br>")


if __name__ == "__main__":
    print(markdown_everyday() if sys.argv[1:] == ["everyday"] else markdown_reference(), end="")
