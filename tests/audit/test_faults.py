"""Planted faults are named, and dumps without a fault give no finding."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit.faults import KEPT, PLANTED, TRL_TABLES, Fault
from audit.odd import ODD, Odd
from audit.world import END, Rollout, World, give_advantages, sample
from audit.writers import WRITERS, Change, lines
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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rewards_gathered_from_ranks_in_turns_are_named(seed: int, tmp_path: Path) -> None:
    """Whatever was drawn: not by completions that happen to be equal alone."""
    (fault,) = (one for one in PLANTED if one.what == "rewards gathered from two ranks in turns")
    (finding,) = audit(replace(fault, world=replace(fault.world, seed=seed, groups=32)).write(tmp_path)).findings
    assert finding.name == "rewards-mispaired" and "gathered from 2 ranks in turns" in finding.evidence


def in_two_sequences(rollouts: list[Rollout], folder: Path, change: Change | None = None) -> list[Path]:
    """Records of documents whose second sequence begins with the prompt and the first half of what was drawn."""
    records = []
    for line in WRITERS["truestep"](rollouts, folder, change)[0].read_text().splitlines():
        whole = json.loads(line)
        labels = [place for place, label in enumerate(whole["loss_mask"]) if label]
        half = labels[len(labels) // 2]
        both = {"document_id": whole["id"], "sequences": 2, "routed_experts": None}
        first = {name: whole[name][:half] for name in ("input_ids", "loss_mask", "logprobs")}
        first["input_ids"][-1] = END  # a turn
        second = [int(place >= half and label) for place, label in enumerate(whole["loss_mask"])]
        records.append({**whole, **both, **first, "id": f"{whole['id']}.0"})
        records.append({**whole, **both, "loss_mask": second, "id": f"{whole['id']}.1"})
    return [lines(folder / "several.jsonl", [one for one in records if any(one["loss_mask"])])]


@pytest.mark.parametrize("seed", [1, 2])
def test_documents_of_several_sequences_are_rated_as_documents(seed: int, tmp_path: Path) -> None:
    rollouts = sample(World(seed=seed, groups=8))
    assert not audit(in_two_sequences(rollouts, tmp_path)).findings

    def wrong(record: dict[str, Any], index: int) -> None:
        record["advantage"] *= -1 if index in (5, 6) else 1

    (finding,) = audit(in_two_sequences(rollouts, tmp_path, wrong)).findings
    assert finding.name == "advantages" and "2 of " in finding.evidence and finding.count == 2
    rng = np.random.default_rng(seed)
    strangers = rng.permutation([one.group for one in rollouts]).tolist()
    give_advantages(rollouts, strangers)
    assert [one.name for one in audit(in_two_sequences(rollouts, tmp_path)).findings][:1] == ["advantages"]


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


@pytest.mark.parametrize(("source", "name"), [("truestep", "advantage"), ("prime-rl", "advantages")])
def test_an_advantage_that_is_nan_is_named_with_its_token(source: str, name: str, tmp_path: Path) -> None:
    """At a label behind the first; at a token that is no label it says nothing."""
    places = {}

    def at(label: bool) -> Change:
        def change(record: dict[str, Any], index: int) -> None:
            mask = record["loss_mask"]
            record[name] = [0.5] * len(mask) if isinstance(record[name], float) else record[name]
            place = places[index] = [i for i, own in enumerate(mask) if bool(own) == label][-1]
            if index == 7:
                record[name][place] = math.nan

        return change

    rollouts = sample(World(longest=60))
    assert len(rollouts[7].drawn) > 1
    found = audit(WRITERS[source](rollouts, tmp_path / "prompt", at(label=False))).findings
    assert "reward-invalid" not in [one.name for one in found]
    finding = audit(WRITERS[source](rollouts, tmp_path / "label", at(label=True))).findings[0]
    assert (finding.name, finding.position, finding.count) == ("reward-invalid", places[7], 1)
    assert finding.evidence.startswith("an advantage that is no number, in 1 of ")


def test_every_format_and_every_finding_is_planted() -> None:
    everywhere = [fault.finding for fault in PLANTED] + [fault.finding for fault in (*KEPT, *TRL_TABLES)]
    assert {fault.format for fault in PLANTED} == set(WRITERS) == set(NAMES)
    by_a_model = {"vocabulary", "numerics"}  # tests/audit/test_model.py
    assert set(everywhere) == {check.name for check in TABLE} - by_a_model
    assert len(everywhere) >= 40


def test_what_a_finding_explains_is_one(tmp_path: Path) -> None:
    assert all(name in BY_NAME for check in TABLE for name in check.explains)
