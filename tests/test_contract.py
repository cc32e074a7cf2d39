"""docs/contract.md names all that the code knows, and every citation of it names a section that it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from truestep.config.describe import options
from truestep.config.losses import NormalizeBy
from truestep.rollouts.advantages import RULES
from truestep.rollouts.fields import record_names

ROOT = Path(__file__).parents[1]
CONTRACT = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([^`]+)`", CONTRACT))
SECTIONS = {int(number): title for number, title in re.findall(r"^## (\d+)\. (.+)$", CONTRACT, flags=re.MULTILINE)}
CITATION = re.compile(r"contract\.md\)?,\s+(?:#\s+)?sections?\s+(\d+)(?:\s+(?:to|and)\s+(\d+))?")


def section(title: str) -> str:
    (number,) = (number for number, found in SECTIONS.items() if found == title)
    return CONTRACT.split(f"\n## {number}. ")[1].split("\n## ")[0]


def cited(text: str) -> list[int]:
    return [int(number) for pair in CITATION.findall(text) for number in pair if number]


def sources() -> dict[str, str]:
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "docs") if (ROOT / name).is_dir()]
    files = [file for folder in folders for kind in ("*.py", "*.md") for file in sorted(folder.rglob(kind))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files if file != Path(__file__)}


def test_sections_are_numbered_from_1_without_a_gap() -> None:
    assert list(SECTIONS) == list(range(1, len(SECTIONS) + 1)) and len(SECTIONS) > 8


def test_every_metric_is_named() -> None:
    table = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split("\n| --- ")[1]
    rows = [line.split("|")[1] for line in table.splitlines()[1:] if line.startswith("|")]
    metrics = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"loss", "grad_norm", "log_ratio_p99", "min_staleness"} <= metrics
    assert metrics <= set(re.findall(r"`(\w+)`", section("Metrics")))


def test_every_loss_denominator_rule_and_field_is_named() -> None:
    assert set(options()["loss.type"].choices) - {"custom"} <= set(re.findall(r"^\| `(\w+)`", section("Losses"), re.M))
    assert set(get_args(NormalizeBy)) <= set(re.findall(r"^\| `(\w+)`", section("Denominators and terms"), re.M))
    assert {*RULES, "none"} <= set(re.findall(r"`(\w+)`", section("Advantages")))
    assert set(record_names()) <= set(re.findall(r"`(\w+)`", section("Records")))


def test_every_option_that_it_names_exists() -> None:
    known = {*options(), *(name.split(".")[0] for name in options())}
    dotted = {name.split(":")[0] for name in NAMED if re.match(r"(model|loss|data|schedule|optimizer)\.\w+", name)}
    assert dotted and dotted <= known | {"model.safetensors"}


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)#]+)", CONTRACT):
        assert (ROOT / "docs" / target).is_file(), target


def test_every_citation_names_a_section_that_exists() -> None:
    found = 0
    for file, text in sources().items():
        numbers = cited(text)
        found += len(numbers)
        assert set(numbers) <= set(SECTIONS), file
    assert found > 10


def test_nothing_cites_what_is_not_in_the_repository() -> None:
    outside = re.compile(r"\bSPEC(\.md)?\b(?!_)|\bDESIGN\.md|\bHOUSE\.md")
    assert not [file for file, text in sources().items() if outside.search(text)]


def test_a_citation_is_read_as_it_is_written() -> None:
    assert cited("as docs/contract.md, sections 3 to 9, say; docs/contract.md, section 12") == [3, 9, 12]
    assert cited("[contract.md](contract.md), section 2; docs/contract.md,\n# section 5") == [2, 5]
    assert cited("docs/contract.md") == []
