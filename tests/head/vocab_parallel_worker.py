"""One rank of tests/head/test_vocab_parallel.py: its slice of the vocabulary against the whole, for every loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from head.head_cases import largest_difference, make_rows, relative
from losses.label_cases import LOSSES, make_case, make_labels, make_objective
from truestep.head.chunked import HeadRows, forward_backward
from truestep.head.logits import HeadSettings
from truestep.head.vocab_parallel import VocabularyShard
from truestep.types import Coefficients, RowStatistics

CUTS = {2: (0, 40, 61), 4: (0, 1, 30, 47, 61)}  # of no equal size


def check(rank: int, world: int, softcap: float | None, loss: dict, chunk: int | None) -> None:
    case = make_case(seed=4)
    objective = make_objective(loss | {"entropy_bonus": 0.2, "z_loss": 0.01, "normalize_by": "document_means"})
    template = make_labels(case, objective.denominator)
    count = len(template.document)
    settings = HeadSettings(softcap=softcap, chunk_size=chunk)
    whole = make_rows(count, 61, settings=settings, dtype=torch.float64)

    def ask(rows: slice, seen: RowStatistics) -> Coefficients:
        given = {name: getattr(seen, name) for name in ("logprobs", "entropy", "logsumexp")}
        return objective.coefficients(replace(template[rows], **given), case.totals)

    def run(rows: HeadRows) -> tuple:
        buffer = torch.zeros_like(rows.weight)
        documents = template.num_labels.tolist() if objective.whole_documents else None
        return forward_backward(rows, ask, weight_gradient=buffer, document_labels=documents), buffer

    first, last = CUTS[world][rank], CUTS[world][rank + 1]
    shard = VocabularyShard(dist.group.WORLD, first, last - first)
    wanted, wanted_buffer = run(whole)
    found, buffer = run(replace(whole, weight=whole.weight[first:last].clone(), shard=shard))
    for name in ("logprobs", "entropy", "logsumexp"):
        assert largest_difference(getattr(found.statistics, name), getattr(wanted.statistics, name)) < 1e-12, name
    assert relative(found.hidden_gradient, wanted.hidden_gradient) < 1e-12
    difference = (buffer - wanted_buffer[first:last]).norm() / wanted_buffer.norm()
    assert difference < 1e-12


def check_all(checked: Path) -> None:
    """Leaves a file for each rank that came to its end, with the number of cases."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cases = [(loss, softcap, chunk) for loss in LOSSES for softcap in (None, 2.0) for chunk in (4, None)]
    for loss, softcap, chunk in cases:
        check(rank, world, softcap, loss, chunk)
    (checked / str(rank)).write_text(str(len(cases)), encoding="utf-8")
