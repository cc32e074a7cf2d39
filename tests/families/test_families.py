"""Families of models: some of docs/families.md tried again, and before a release all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers

from families.columns import COLUMNS, YES, try_family
from families.page import try_all, write
from families.tiny_families import families

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
LEAST = 60


def rows() -> dict[str, list[str]]:
    """Read the table of the page."""
    found = re.findall(r"^\| ([\w-]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    split = {name: cells.split(" | ") for name, cells in found if name not in ("family", "---")}
    return {name: cells for name, cells in split.items() if len(cells) == len(COLUMNS)}


def of_page(family: str) -> dict[str, str]:
    return dict(zip(COLUMNS, rows()[family], strict=True))


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron", "phimoe"])
def test_families_do_what_the_page_says(family: str, tmp_path: Path) -> None:
    tried = ("trains", "engine", "export")
    found = try_family(family, tmp_path, tried)
    assert {name: found[name] == YES for name in tried} == {name: of_page(family)[name] == YES for name in tried}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["granite_swa", "gemma4_text", "qwen3_next"])
def test_families_do_what_the_page_says_in_every_column(family: str, tmp_path: Path) -> None:
    found, page = try_family(family, tmp_path), of_page(family)
    tried = [name for name in COLUMNS if page[name] != "-"]
    assert {name: found[name] == YES for name in tried} == {name: page[name] == YES for name in tried}


def test_a_family_that_does_not_train_is_refused_with_a_reason(tmp_path: Path) -> None:
    found = try_family("bloom", tmp_path)
    assert "packed documents give other values" in found["trains"]
    assert "by code of its own" in found["trains"]


def test_the_page_has_every_family_and_enough_of_them_train() -> None:
    text = PAGE.read_text(encoding="utf-8")
    count, every = map(int, re.search(r"(\d+) of (\d+) train", text).groups())  # type: ignore[union-attr]
    assert count == len(rows()) >= LEAST
    if f"transformers {transformers.__version__} " in text:
        assert every == len(families())
        refused = text.partition("## Families that are refused")[2]
        missing = [
            name for name in families() if name not in rows() and not re.search(rf"\b{re.escape(name)}\b", refused)
        ]
        assert not missing


@pytest.mark.release
@pytest.mark.timeout(7200)
def test_the_page_is_what_trying_every_family_gives(tmp_path: Path) -> None:
    found = try_all(families(), tmp_path)
    faults = {name: row for name, row in found.items() if row["trains"].startswith("a fault")}
    assert not faults
    if f"transformers {transformers.__version__} " in PAGE.read_text(encoding="utf-8"):
        assert write(found) == PAGE.read_text(encoding="utf-8")
