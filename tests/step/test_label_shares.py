"""Which labels each of the ranks that share a micro-batch's tokens computes, and whose rows they are."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_documents, pack_all
from truestep.model.mixers.context_parallel import Context, heads_needed
from truestep.step.compute.label_shares import LabelShare

RANKS = st.integers(2, 5)
LENGTHS = st.lists(st.integers(1, 30), max_size=6)


def shares_of(lengths: list[int], size: int) -> tuple[list[LabelShare], torch.Tensor, list[int]]:
    documents = make_documents(lengths, seed=len(lengths))
    batch = pack_all(documents, size)
    places = [Context(None, rank, size) for rank in range(size)]  # type: ignore[arg-type]
    counts = [document.num_labels for document in documents]
    return [LabelShare.of(batch, place) for place in places], batch.labels.rows, counts


@settings(deadline=None)
@given(LENGTHS, RANKS)
def test_every_label_is_dealt_once_and_evenly_and_its_row_comes_from_where_it_lies(
    lengths: list[int], size: int
) -> None:
    shares, label_rows, _ = shares_of(lengths, size)
    everyone = list(range(len(label_rows)))
    assert [label for share in shares for label in everyone[share.own]] == everyone
    sizes = [share.own.stop - share.own.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    tokens = pack_all(make_documents(lengths, seed=len(lengths)), size).tokens.input_ids
    for rank, share in enumerate(shares):
        run = range(len(tokens))[share.context.run(len(tokens))] if share.context else range(0)
        assert share.first_token == run.start
        assert all(row in run for row in label_rows[share.predicted].tolist())
        assert sum(share.send) == len(share.predicted)
        assert sum(share.receive) == sizes[rank]
        assert [share.receive[other] for other in range(size)] == [fellow.send[rank] for fellow in shares]
    # What a rank sends is in order, and so is what it gets: rank after rank, label after label.
    arrived: list[list[int]] = [[] for _ in shares]
    for share in shares:
        left = share.predicted.tolist()
        for to, count in enumerate(share.send):
            arrived[to] += left[:count]
            left = left[count:]
    assert arrived == [everyone[share.own] for share in shares]


@settings(deadline=None)
@given(LENGTHS, RANKS)
def test_a_documents_labels_are_whole_on_one_rank_or_at_the_edges_of_several(lengths: list[int], size: int) -> None:
    shares, _, counts = shares_of(lengths, size)
    ends = {0, *accumulate(counts)}
    for share in shares:
        runs = share.token_runs(counts)
        assert runs.lead + sum(runs.whole) + runs.tail == share.own.stop - share.own.start
        place = share.own.start + runs.lead
        assert not runs.lead or share.own.start not in ends
        for count in runs.whole:
            assert {place, place + count} <= ends
            place += count
        assert not runs.tail or (place in ends and share.own.stop not in ends)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 8))
def test_each_rank_gets_the_key_value_heads_of_its_queries(keys: int, group: int, share: int) -> None:
    queries = keys * group
    if queries % share:
        return
    size = queries // share
    sent = heads_needed(queries, keys, size)
    each = len(sent) // size
    assert len(sent) == size * each and share % each == 0, "attention groups as many queries with each of them"
    for head in range(queries):
        rank, place = divmod(head, share)
        assert sent[rank * each + place // (share // each)] == head // group
    if keys % size == 0:
        assert sent == tuple(range(keys)), "nothing is sent twice"
