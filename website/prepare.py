"""Lays the pages of the repository out for the generator of the documentation site: `python prepare.py DIRECTORY`.

The repository's Markdown is written to be read where it is, and links to sources too. So the pages are copied as they
lie, and every file or directory of the repository that a page links to becomes a page: of a file its text, of a
directory the list of its files.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# The navigation. A page of docs/ that is not in it comes under More.
NAVIGATION: dict[str, list[str]] = {
    "Begin": [
        "README.md",
        "docs/tutorial.md",
        "examples/README.md",
        "docs/glossary.md",
        "docs/terminal.md",
        "docs/troubleshooting.md",
        "docs/mistakes.md",
        "docs/coming-from.md",
    ],
    "Rollouts": [
        "docs/rewards.md",
        "docs/environments.md",
        "docs/agents.md",
        "docs/tinker.md",
        "docs/rollouts.md",
        "docs/engine.md",
        "docs/sampling.md",
        "docs/lies.md",
        "docs/sft.md",
        "docs/parity.md",
        "docs/audit.md",
        "docs/replay.md",
    ],
    "Training": [
        "docs/objectives.md",
        "docs/adapters.md",
        "docs/optimizers.md",
        "docs/memory.md",
        "docs/speed.md",
        "docs/ranks.md",
        "docs/launch.md",
        "docs/machines.md",
    ],
    "Reference": ["docs/options.md", "docs/python.md", "docs/configuration.md", "docs/metrics.md", "docs/contract.md"],
    "More": [],
    "Inside": [
        "docs/architecture.md",
        "benchmarks/RESULTS.md",
        "tests/README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "CHANGELOG.md",
    ],
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".json": "json", ".toml": "toml", ".md": "markdown"}
PICTURES = (".png", ".svg", ".webp")  # copied as they are
LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")


def listed() -> dict[str, list[str]]:
    """Give the navigation with every page that is there, and no other."""
    known = {page for pages in NAVIGATION.values() for page in pages}
    others = sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))
    whole = NAVIGATION | {"More": [page for page in others if page not in known]}
    there = {name: [page for page in pages if (ROOT / page).is_file()] for name, pages in whole.items()}
    return {name: pages for name, pages in there.items() if pages}


class Site:
    def __init__(self, directory: Path):
        self.directory = directory
        self.pages = {page for pages in listed().values() for page in pages}
        self.made: set[str] = set()

    def write(self, path: str, text: str) -> None:
        file = self.directory / "pages" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def copy(self, page: str) -> None:
        """Copy a page of the repository, its links changed to where their targets are on the site."""
        place, kept = PurePosixPath(on_site(page)).parent, []
        fenced = False
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            fenced ^= line.lstrip().startswith("```")
            kept.append(line if fenced else unescaped(LINK.sub(lambda link: self.target(page, place, link), line)))
        self.write(on_site(page), "\n".join(kept) + "\n")

    def target(self, page: str, place: PurePosixPath, link: re.Match[str]) -> str:
        if not link[1] or re.match(r"\w+:", link[1]):
            return link[0]
        name = os.path.normpath(PurePosixPath(page).parent / link[1])
        if not (ROOT / name).exists():
            raise SystemExit(f"{page}: {link[0]}: there is no {name}")
        if name.endswith(PICTURES):
            (self.directory / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, self.directory / "pages" / name)
            return os.path.relpath(name, place)
        if name not in self.pages:
            self.make(name)
        return os.path.relpath(on_site(name), place) + (link[2] or "")

    def make(self, name: str) -> None:
        """Make a page of a file or a directory of the repository."""
        if name in self.made:
            return
        self.made.add(name)
        source = ROOT / name
        if source.is_dir():
            rows = "".join(f"| `{file}` | {says} |\n" for file, says in contents(source))
            self.write(on_site(name), f"# {name}\n\n| | |\n| --- | --- |\n{rows}")
        else:
            text, language = source.read_text(encoding="utf-8"), LANGUAGES.get(source.suffix, "text")
            fence = "`" * (max((len(run) for run in re.findall("`{3,}", text)), default=2) + 1)
            self.write(on_site(name), f"# {name}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n")


def unescaped(line: str) -> str:
    """Write `a | b` in a table for the site's Markdown, which shows the backslash that GitHub's needs."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line


def on_site(name: str) -> str:
    """Give the place of a page, a file or a directory on the site."""
    if name == "README.md":
        return "index.md"
    if name.endswith(".md"):
        return name.replace("/README.md", "/index.md")
    return f"{name}/index.md" if (ROOT / name).is_dir() else f"{name}.md"


def contents(directory: Path) -> Iterator[tuple[str, str]]:
    """List a directory's files with the first line of what each says about itself."""
    for file in sorted(directory.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            says = ""
            if file.suffix == ".py":
                says = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
            yield str(file.relative_to(directory)), says.replace("|", "\\|")


def title(page: str) -> str:
    if page == "README.md":
        return "truestep"
    (heading, *_) = re.findall(r"^# (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return str(heading).replace("`", "")


def prepare(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    site = Site(directory)
    for page in sorted(site.pages):
        site.copy(page)
    sections = []
    for name, pages in listed().items():
        entries = ", ".join(f"{{ {json.dumps(title(page))} = {json.dumps(on_site(page))} }}" for page in pages)
        sections.append(f"  {{ {json.dumps(name)} = [{entries}] }},")
    base = (ROOT / "website" / "zensical.toml").read_text(encoding="utf-8")
    # The navigation belongs to [project], so it stands before the tables of it.
    head, tail = base.split("\n[project.theme]", 1)
    navigation = "nav = [\n" + "\n".join(sections) + "\n]\n\n"
    (directory / "zensical.toml").write_text(f"{head}\n{navigation}[project.theme]{tail}", encoding="utf-8")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
