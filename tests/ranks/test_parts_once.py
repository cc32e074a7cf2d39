"""Documents in parts: each is sent to the other ranks once, and every rank gets the same in one order."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from documents import make_documents
from ranks.cases import on_ranks
from truestep.config.schema import Config
from truestep.ranks.group import Ranks
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.source import FileSource
from truestep.run.assemble.policy import join_ranks
from truestep.step.plan.plan import StepRule
from truestep.step.plan.queue import PlanQueue
from truestep.types import Rollout

SIZES = (11, 30, 2)


def part_of(rank: int) -> tuple[Rollout, ...]:
    import dataclasses

    made = make_documents([3 + number % 5 for number in range(SIZES[rank])])
    return tuple(dataclasses.replace(one, id=f"{rank}:{one.id}") for one in made)


class Counting:
    """Ranks that count what is sent: documents, and bytes."""

    def __init__(self, ranks: Ranks):
        self._ranks, self.documents, self.bytes = ranks, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def gather_parts(self, value: Any, ahead: bool = False) -> list[Any]:
        self.bytes += len(pickle.dumps(value))
        if isinstance(value, Sequence) and value and isinstance(value[0], Rollout):
            self.documents += len(value)
        return self._ranks.gather_parts(value, ahead)


def drain(keep: bool, folder: str) -> None:
    ranks = join_ranks(Config.model_validate({"model": {"path": "none", "device": "cpu"}}))
    counting: Any = Counting(ranks)
    source = PartedSource(FileSource(part_of(ranks.rank)), counting)
    rule = StepRule(7, keep, 1, 1, 16, ranks.data)
    queue, names, states = PlanQueue(source, rule), [], []
    while (plan := queue.next_plan()) is not None:
        names.append([document.id for document in plan.documents])
        states.append(queue.state())
        if len(names) == 3:  # a restart in the middle
            source = PartedSource(FileSource(part_of(ranks.rank)), counting)
            queue = PlanQueue(source, rule)
            queue.restore(json.loads(json.dumps(states[-1])), [])
    found = {"names": names, "sent": counting.documents, "bytes": counting.bytes, "states": states}
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(found))


def test_each_document_is_sent_once(tmp_path: Path) -> None:
    for keep in (False, True):
        on_ranks(len(SIZES), drain, keep, str(tmp_path))
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(SIZES))]
        assert all(one["names"] == found[0]["names"] and one["states"] == found[0]["states"] for one in found)
        trained = [name for step in found[0]["names"] for name in step]
        assert sorted(trained) == sorted(one.id for rank in range(len(SIZES)) for one in part_of(rank))
        for size, one in zip(SIZES, found, strict=True):
            # What was looked at for the step after the restart's place is looked at again by the new process.
            assert size <= one["sent"] <= size + (8 if keep else 0)
