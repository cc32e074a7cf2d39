"""Documents of files as a stream with a position: epochs, shuffles, and what a restart accepts."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_documents
from truestep.rollouts.source import FileSource, SourceError
from truestep.types import Rejected, Rollout

DOCUMENTS = make_documents([3, 4, 5, 6, 7, 8, 3, 4, 5, 6])


def names(documents: list[Rollout]) -> list[str]:
    return [document.id for document in documents]


def everything(source: FileSource) -> list[str]:
    return names(source.take(10**6, 0).documents)


def resumed(state: dict, *args, **options) -> FileSource:
    source = FileSource(*args, **options)
    source.restore(json.loads(json.dumps(state)))
    return source


def test_file_order_epoch_after_epoch() -> None:
    source = FileSource(DOCUMENTS, epochs=2)
    assert names(source.peek(3)) == names(source.peek(3)) == ["d0", "d1", "d2"]
    assert names(source.take(3, 0).documents) == ["d0", "d1", "d2"]
    assert names(source.take(9, 0).documents) == [*names(DOCUMENTS[3:]), "d0", "d1"]
    assert names(source.peek(100)) == names(DOCUMENTS[2:])
    assert everything(source) == names(DOCUMENTS[2:])
    assert source.take(1, 0).documents == source.peek(1) == []


def test_each_epoch_has_its_own_permutation() -> None:
    order = everything(FileSource(DOCUMENTS, epochs=6, shuffle_seed=3))
    epochs = [tuple(order[start : start + 10]) for start in range(0, 60, 10)]
    assert all(sorted(epoch) == sorted(names(DOCUMENTS)) for epoch in epochs)
    assert len({*epochs, tuple(names(DOCUMENTS))}) == 7
    assert order == everything(FileSource(DOCUMENTS, epochs=6, shuffle_seed=3))
    assert order != everything(FileSource(DOCUMENTS, epochs=6, shuffle_seed=4))
    assert order[:30] == everything(FileSource(DOCUMENTS, epochs=3, shuffle_seed=3)), "more epochs change no epoch"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 10),
    st.integers(1, 4),
    st.none() | st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=8),
)
def test_any_reading_gives_the_same_order(count: int, epochs: int, seed: int | None, reads: list) -> None:
    """Whatever is peeked at in between, and with a restart at each take."""
    documents = DOCUMENTS[:count]
    expected = everything(FileSource(documents, epochs=epochs, shuffle_seed=seed))
    source = FileSource(documents, epochs=epochs, shuffle_seed=seed)
    got: list[str] = []
    for take, peek in reads:
        assert names(source.peek(peek)) == expected[len(got) : len(got) + peek]
        got += names(source.take(take, 0).documents)
        source = resumed(source.state(), documents, epochs=epochs, shuffle_seed=seed)
    assert got + everything(source) == expected


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("position", [1, 9, 10, 13, 20])
def test_changed_files_are_refused(seed: int | None, position: int) -> None:
    source = FileSource(DOCUMENTS, epochs=2, shuffle_seed=seed)
    source.take(position, 0)
    state = source.state()
    longer = dataclasses.replace(DOCUMENTS[0], input_ids=np.arange(4), loss_mask=np.arange(4) > 1)
    other_tokens = dataclasses.replace(DOCUMENTS[0], input_ids=DOCUMENTS[0].input_ids + 1)
    other_labels = dataclasses.replace(DOCUMENTS[0], loss_mask=DOCUMENTS[0].loss_mask[[0, 2, 1]])
    assert DOCUMENTS[0].num_labels == 1, "the other labels are as many"
    for changed in (
        DOCUMENTS[1:],
        (longer, *DOCUMENTS[1:]),
        (other_tokens, *DOCUMENTS[1:]),
        (other_labels, *DOCUMENTS[1:]),
        (dataclasses.replace(DOCUMENTS[0], id="another"), *DOCUMENTS[1:]),
        (DOCUMENTS[5], *DOCUMENTS[1:5], DOCUMENTS[0], *DOCUMENTS[6:]),
        (),
    ):
        with pytest.raises(SourceError, match=r"data\.path"):
            resumed(state, changed, epochs=2, shuffle_seed=seed)


def test_files_may_grow_at_the_end() -> None:
    source = FileSource(DOCUMENTS[:6])
    source.take(4, 0)
    assert everything(resumed(source.state(), DOCUMENTS)) == names(DOCUMENTS[4:])
    source.take(4, 0)  # to the end
    assert everything(resumed(source.state(), DOCUMENTS)) == names(DOCUMENTS[6:])


def test_growth_is_refused_where_it_would_train_a_document_twice_or_never() -> None:
    shuffled = FileSource(DOCUMENTS[:6], shuffle_seed=0)
    shuffled.take(2, 0)
    second_epoch = FileSource(DOCUMENTS[:6], epochs=2)
    second_epoch.take(7, 0)
    with pytest.raises(SourceError):
        resumed(shuffled.state(), DOCUMENTS, shuffle_seed=0)
    for more in (7, 8, 10):
        with pytest.raises(SourceError):
            resumed(second_epoch.state(), DOCUMENTS[:more], epochs=2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, None), (None, 1)])
@pytest.mark.parametrize("position", [4, 10, 12])
def test_another_order_is_refused(before: int | None, after: int | None, position: int) -> None:
    """A position in one permutation is not a position in another: documents would be trained twice and never."""
    source = FileSource(DOCUMENTS, epochs=2, shuffle_seed=before)
    source.take(position, 0)
    with pytest.raises(SourceError):
        resumed(source.state(), DOCUMENTS, epochs=2, shuffle_seed=after)


def test_rejected_records_are_told_once() -> None:
    rejected = (Rejected("a.jsonl", 3, "no ids"),)
    source = FileSource(DOCUMENTS, rejected)
    assert source.take(1, 0).rejected == rejected
    assert not source.take(1, 0).rejected and not source.aside().rejected
