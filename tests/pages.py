"""The pages of the documentation as a parser of Markdown sees them: headings, links, code blocks and inline code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

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
            page.blocks.append(Block(token.info.strip(), token.content, line))
        for child in token.children or []:
            if child.type == "link_open":
                page.links.append((str(child.attrs["href"]), line))
            elif child.type == "code_inline":
                page.code.append((child.content, line))
        if heading and token.type == "inline":
            page.anchors.add(_slug(_plain(token), page.anchors))
    return page


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
