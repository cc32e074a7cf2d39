"""What a checkpoint of another source is told, and which sources can be looked at, alone and shared."""

from __future__ import annotations

import pytest

from documents import make_documents
from truestep.ranks.group import ALONE
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.shared import SharedPeekableSource, SharedSource
from truestep.rollouts.source import FileSource, PeekableSource, SourceError, refuse_other_kind

STATES = {
    "position": {"position": 3, "fingerprint": "f"},
    "parts": {"parts": [{}, {}]},
    "transport": {"transport": {}, "documents": {}},
    "groups": {"groups": 4, "fingerprint": "f"},
}
WORDS = {
    "position": "rollout files that every rank reads",
    "parts": "rollout files of which each rank reads a part",
    "transport": "documents that are sent",
    "groups": "the prompts of a sampler",
}


def files() -> FileSource:
    return FileSource(make_documents([3, 4, 5, 6]))


@pytest.mark.parametrize("made_from", STATES)
@pytest.mark.parametrize("kind", STATES)
def test_each_kind_of_source_takes_its_own_checkpoints_alone(kind: str, made_from: str) -> None:
    state = STATES[made_from]
    if kind == made_from:
        refuse_other_kind("option", kind, state)
    else:
        with pytest.raises(SourceError) as caught:
            refuse_other_kind("option", kind, state)
        assert str(caught.value) == (
            f"option: this run's checkpoint was made from {WORDS[made_from]}, not from {WORDS[kind]}; give it the "
            "same, or another checkpoint.directory"
        )


def test_parts_of_another_number_of_ranks() -> None:
    with pytest.raises(SourceError, match="data.path: .* made from the parts of 2 ranks, not from those of 1"):
        PartedSource(files(), ALONE).restore(STATES["parts"])


def test_what_can_be_looked_at() -> None:
    assert isinstance(files(), PeekableSource)
    assert isinstance(PartedSource(files(), ALONE), PeekableSource)
    assert isinstance(SharedPeekableSource(files(), ALONE), PeekableSource)
    assert not isinstance(SharedSource(files(), ALONE), PeekableSource)


@pytest.mark.parametrize("look", [0, 1, 2, 3])
def test_a_shared_source_gives_what_its_own_gives_however_it_is_looked_at(look: int) -> None:
    shared, own = SharedPeekableSource(files(), ALONE), files()
    for count in (2, 1, 3):
        assert [d.id for d in shared.peek(look)] == [d.id for d in own.peek(look)]
        assert [d.id for d in shared.take(count, 0).documents] == [d.id for d in own.take(count, 0).documents]
        assert shared.state() == own.state()


def test_what_was_looked_at_and_taken_is_not_given_again() -> None:
    shared, own = SharedPeekableSource(files(), ALONE), files()
    shared.peek(2)
    for count in (2, 1, 2):
        assert [d.id for d in shared.take(count, 0).documents] == [d.id for d in own.take(count, 0).documents]
