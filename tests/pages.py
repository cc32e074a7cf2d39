"""The pages of the documentation as a parser of Markdown sees them: headings, links, code blocks and inline code."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from truestep.commands.cli import ConfigCommand, main
from truestep.config.load import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int


@dataclass
class Page:
    path: Path
    """The file, from the repository's root."""
    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, int]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    code: list[tuple[str, int]] = field(default_factory=list)
    """Inline code, with its line."""

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"

    def of(self, *languages: str) -> Iterator[Block]:
        return (block for block in self.blocks if block.language in languages)


def read_page(text: str, path: Path) -> Page:
    page = Page(path)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    heading, line = False, 0
    for token in tokens:
        line = token.map[0] + 1 if token.map else line
        heading = token.type == "heading_open" or (heading and token.type != "heading_close")
        if token.type == "fence":
            page.blocks.append(Block(token.info.split(" ")[0].strip(), token.content, line))
        for child in token.children or []:
            if child.type == "link_open":
                page.links.append((str(child.attrs["href"]), line))
            elif child.type == "code_inline":
                page.code.append((child.content, line))
        if heading and token.type == "inline":
            page.anchors.add(_slug(_plain(token), page.anchors))
    return page


def plain_blocks(text: str) -> Iterator[str]:
    """Give each paragraph, list item and cell of a table as one line of plain text, with code in backticks."""
    heading = False
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        heading = token.type == "heading_open" or (heading and token.type != "heading_close")
        if token.type == "inline" and not heading:
            yield " ".join("".join(map(_as_text, token.children or [])).split())


def _as_text(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak", "html_inline"):
        return " "
    return f"`{token.content}`" if token.type == "code_inline" else token.content


def all_pages() -> list[Page]:
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), ROOT / "tests/README.md"]
    return [read_page(file.read_text(encoding="utf-8"), file.relative_to(ROOT)) for file in sorted(files)]


def _plain(token: Token) -> str:
    return "".join(child.content for child in token.children or [] if child.type in ("text", "code_inline"))


def _slug(heading: str, taken: set[str]) -> str:
    """Name a heading's anchor as GitHub does."""
    slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    number = 0
    while (name := f"{slug}-{number}" if number else slug) in taken:
        number += 1
    return name


def shell_commands(block: str) -> Iterator[list[str]]:
    """Give the words of each command of a shell block; what stands in a here-document is none."""
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        if end := re.search(r"<<-?\s*['\"]?(\w+)", line):
            line = line[: end.start()]
            for inner in lines:
                if inner.strip() == end[1]:
                    break
        reader = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        reader.whitespace_split = True
        command: list[str] = []
        for word in reader:
            if set(word) <= set("&|;"):
                yield command
                command = []
            else:
                command.append(word)
        yield command


def truestep_arguments(command: list[str]) -> list[str] | None:
    """Find what stands behind `truestep`, or behind `-m truestep`, in a command; None where it is another one."""
    for place, word in enumerate(command):
        if re.fullmatch(r"(\S*/)?truestep", word) and (
            all(re.fullmatch(r"\w+=.*", before) for before in command[:place]) or command[place - 1] == "-m"
        ):
            return command[place + 1 :]
    return None


@contextmanager
def elsewhere() -> Iterator[None]:
    """Work in a directory that is gone afterwards."""
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        yield


def refused(arguments: list[str], inline: bool = False) -> str | None:
    """Parse a command as it would be, up to the function that it calls; give what is wrong with it."""
    arguments = [word for word in arguments if word not in ("--help", "-h", "--help-all", "--version")]
    with elsewhere():
        for word in arguments[1:]:  # directories that must exist do
            if re.fullmatch(r"[\w./*-]+", word) and not word.startswith(("-", "/")):
                Path(word).mkdir(parents=True, exist_ok=True)
        try:
            group = main.make_context("truestep", arguments or ["demo"])
            while isinstance(group.command, click.Group):
                name, command, rest = group.command.resolve_command(group, [*group.protected_args, *group.args])
                assert command is not None
                group = command.make_context(name, rest, parent=group)
        except click.UsageError as error:
            missing = inline and isinstance(error, click.MissingParameter)  # `truestep verify` alone names the command
            return None if missing else error.format_message()
        if isinstance(group.command, ConfigCommand):
            return wrong_options({}, group.params["overrides"])
    return None


# What a part of a configuration needs around it to be a whole one: the first that makes it one is enough.
SAMPLED = {"data": {"group_size": 4}, "schedule": {"docs_per_step": 256, "steps": 10}}
PROMPTS = {"prompts": "p.jsonl", "reward": "m:f"}
SERVERS = {"type": "server", "urls": ["http://127.0.0.1:8000"], "model": "policy"}
AROUND: tuple[dict[str, Any], ...] = (
    {"data": {"path": "r.jsonl"}},
    {},
    SAMPLED | {"sampler": PROMPTS},
    SAMPLED | {"sampler": PROMPTS, "evaluation": {"prompts": "h.jsonl"}},
    SAMPLED | {"sampler": PROMPTS | SERVERS},
    SAMPLED | {"sampler": PROMPTS, "loss": {"max_labels": 100}},
    {"data": {"path": "r.jsonl"}, "loss": {"type": "cross_entropy"}},
    {"data": {"source": {"type": "stream", "stream": "s"}, "group_size": 4}, "schedule": {"docs_per_step": 8}},
)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = dict(below)
    for name, value in above.items():
        old = both.get(name)
        both[name] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return both


def wrong_options(options: dict[str, Any], overrides: tuple[str, ...] = ()) -> str | None:
    """Load options through the schema, alone or with what they need around them; give what is wrong in every case."""
    problems: list[str] = []
    file = Path("page.yaml")
    for around in (None, *AROUND):
        whole = options if around is None else merged({"model": {"path": "m"}} | around, options)
        file.write_text(yaml.safe_dump(whole), encoding="utf-8")
        try:
            load_config(file, overrides)
            return None
        except ConfigError as error:
            problems.append(str(error))
    return min(problems, key=len)
