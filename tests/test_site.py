"""The documentation site: every page is in its navigation, and what a page links to is on it. `make site` builds it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT

sys.path.insert(0, str(ROOT / "website"))
try:
    import prepare
finally:
    sys.path.pop(0)


def leaves(navigation: list[dict[str, Any]]) -> list[str]:
    return [page for section in navigation for pages in section.values() for entry in pages for page in entry.values()]


def test_every_page_is_in_the_navigation(tmp_path: Path) -> None:
    prepare.prepare(tmp_path)
    project = tomllib.loads((tmp_path / "zensical.toml").read_text(encoding="utf-8"))["project"]
    places = leaves(project["nav"])
    assert {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} <= set(places)
    assert places[0] == "index.md" and len(places) == len(set(places))
    assert all((tmp_path / "pages" / place).is_file() for place in places)
    assert project["theme"]["features"], "the options behind the navigation are those of the theme still"


def test_what_a_page_links_to_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repository"
    for name, text in (
        (
            "README.md",
            "# r\n[a](docs/a.md#x) [b](src) [c](https://example.org) [d](#r)\n```\n[no](link.md)\n```\n"
            "![p](docs/p.png)",
        ),
        ("docs/p.png", "a picture"),
        ("docs/a.md", "# A `b`\n[up](../README.md) [code](../src/x.py)\n| `a \\| b` \\| |\n"),
        ("src/x.py", '"""It | does."""\n# ```\n'),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "website").mkdir()
    (root / "website" / "zensical.toml").write_text("[project]\n\n[project.theme]\nfont = false\n", encoding="utf-8")
    monkeypatch.setattr(prepare, "ROOT", root)
    prepare.prepare(tmp_path / "out")
    pages = tmp_path / "out" / "pages"
    index = (pages / "index.md").read_text(encoding="utf-8")
    assert index.startswith(
        "# r\n[a](docs/a.md#x) [b](src/index.md) [c](https://example.org) [d](#r)\n```\n[no](link.md)"
    )
    assert index.endswith("![p](docs/p.png)\n") and (pages / "docs/p.png").read_text(encoding="utf-8") == "a picture"
    assert (pages / "docs/a.md").read_text(encoding="utf-8") == (
        "# A `b`\n[up](../index.md) [code](../src/x.py.md)\n| `a | b` \\| |\n"
    )
    assert "| `x.py` | It \\| does. |" in (pages / "src/index.md").read_text(encoding="utf-8")
    assert (pages / "src/x.py.md").read_text(encoding="utf-8").count("````") == 2
    navigation = tomllib.loads((tmp_path / "out" / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert navigation == [{"Begin": [{"truestep": "index.md"}]}, {"More": [{"A b": "docs/a.md"}]}]
    (root / "docs" / "a.md").write_text("# A\n[x](../src/y.py)\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"docs/a\.md: \.\./src/y\.py: there is no src/y\.py"):
        prepare.prepare(tmp_path / "out")
