"""Planted faults are named, and dumps without a fault give no finding."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from audit.faults import KEPT, PLANTED, TRL_TABLES, Fault
from audit.odd import ODD, Odd
from audit.world import World, sample
from audit.writers import WRITERS
from truestep.tools.audit.formats.table import NAMES
from truestep.tools.audit.run import audit
from truestep.tools.audit.table import BY_NAME, TABLE

# Sizes, seeds, temperatures, groups, late samplers and prompts that come again: 40 dumps, each format five times.
WORLDS = (
    World(seed=11),
    World(seed=12, temperature=0.7, groups=6, size=8, longest=60, prompts=10),
    World(seed=13, temperature=1.4, steps=5, groups=3, lag=1, learning=0.02),
    World(seed=14, size=2, groups=12, longest=12, lag=2, learning=0.01),
    World(seed=15, steps=8, groups=3, size=5, prompts=5),
)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    files = fault.write(tmp_path)
    result = audit(files)
    assert [one.name for one in result.findings][:1] == [fault.finding]
    first = result.findings[0]
    assert first.file in map(str, files)
    assert first.line > 0
    assert first.evidence
    assert first.advice == BY_NAME[fault.finding].advice


@pytest.mark.parametrize(("source", "world"), itertools.product(WRITERS, WORLDS), ids=lambda one: str(one)[:24])
def test_a_clean_dump_gives_no_finding(source: str, world: World, tmp_path: Path) -> None:
    result = audit(WRITERS[source](sample(world), tmp_path))
    assert result.samples >= world.steps * world.groups * world.size
    assert not result.findings


@pytest.mark.parametrize(
    ("odd", "source"),
    [pytest.param(odd, source, id=f"{odd.what}-{source}") for odd in ODD for source in odd.formats],
)
def test_an_odd_dump_without_a_fault_gives_no_finding(odd: Odd, source: str, tmp_path: Path) -> None:
    result = audit(odd.write(source, tmp_path))
    assert result.samples and not result.findings, [(one.name, one.evidence) for one in result.findings]


def test_every_format_and_every_finding_is_planted() -> None:
    everywhere = [fault.finding for fault in PLANTED] + [fault.finding for fault in (*KEPT, *TRL_TABLES)]
    assert {fault.format for fault in PLANTED} == set(WRITERS) == set(NAMES)
    by_a_model = {"vocabulary", "numerics"}  # tests/audit/test_model.py
    assert set(everywhere) == {check.name for check in TABLE} - by_a_model
    assert len(everywhere) >= 40


def test_what_a_finding_explains_is_one(tmp_path: Path) -> None:
    assert all(name in BY_NAME for check in TABLE for name in check.explains)
