"""Environments that sleep, hang, exit, flood and write garbage: the run goes on, and each of them is named.

`benchmarks/tails.py` measures what they cost; this is a smaller run of it, with real processes.
"""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from selection import in_tiers

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("ahead", in_tiers([0, 2], [], [2]))
def test_each_failure_costs_its_document_alone_and_is_named(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # the processes of episodes get this path
    tails = importlib.import_module("tails")
    setting = tails.Setting(
        episodes=32, documents=32, group_size=4, turns=3, sleep=0.1, timeout=15.0, share=0.3, steps_ahead=ahead
    )
    made = tails.run(setting, steps=4)
    assert len(made.documents) == 4 * 32
    groups = list(dict.fromkeys(int(document.group_id) for document in made.documents))
    given_up = {record.line for record in made.rejected if "its group could not be completed" in record.reason}
    assert groups == [number for number in range(max(groups) + 1) if number not in given_up], "the order begun"

    kinds = Counter(tails.kind_of(record.reason) for record in made.rejected if record.line not in given_up)
    assert set(kinds) == {"exit", "flood", "garbage"}
    assert any("exit code 7" in record.reason for record in made.rejected)
    assert any(record.reason.startswith("the environment's step returned") for record in made.rejected)
    assert any("connection of its process" in record.reason for record in made.rejected)

    cut = [document for document in made.documents if document.truncated]
    assert cut and all(document.metadata["ended_by"] == "episode_timeout" for document in cut)
    assert all(document.reward == 0.0 for document in cut)
    whole = [document for document in made.documents if not document.truncated]
    assert all(document.metadata["num_turns"] == 3 for document in whole)
    assert all(document.metadata["ended_by"] == "environment" for document in whole)

    # Every episode that was begun is a document or rejected, once.
    names = defaultdict(list)
    for document in made.documents:
        names[int(document.group_id)].append(document.id)
    for record in made.rejected:
        if record.line in names:
            names[record.line].append(record.id)
    for group, found in names.items():
        assert sorted(found) == sorted(f"{group}-{number}" for number in range(len(found)))
