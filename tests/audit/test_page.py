"""The tables of docs/audit.md are those of the code and of the faults: `python -m audit.test_page` prints them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from audit.faults import KEPT, PLANTED, TRL_TABLES
from pages import ROOT
from truestep.tools.audit.formats import table as formats
from truestep.tools.audit.table import TABLE

PAGE = ROOT / "docs" / "audit.md"


def rows(head: str, body: Iterable[Iterable[str]]) -> str:
    count = head.count("|") - 1
    listed = "".join(f"| {' | '.join(cells)} |\n" for cells in body)
    return f"{head}\n|{' --- |' * count}\n{listed}"


def tables() -> dict[str, str]:
    planted = [(one.format, one.what, one.finding) for one in PLANTED]
    planted += [(one.format, one.what, one.finding) for one in (*KEPT, *TRL_TABLES)]
    return {
        "formats": rows(
            "| `--from` | what is read | fields from |",
            ((f"`{one.name}`", one.what, one.source) for one in formats.TABLE),
        ),
        "findings": rows(
            "| finding | what it says | what is compared | threshold |",
            ((f"`{one.name}`", one.title, one.compares, one.threshold) for one in TABLE),
        ),
        "faults": rows(
            "| dump | what was done to it | named |", ((dump, what, f"`{finding}`") for dump, what, finding in planted)
        ),
    }


@pytest.mark.parametrize("name", ["formats", "findings", "faults"])
def test_a_table_of_the_page_is_that_of_the_code(name: str) -> None:
    assert tables()[name] in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    print("\n".join(tables().values()))
