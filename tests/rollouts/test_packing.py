"""Documents into micro-batches, and a micro-batch into tensors, against plain loops."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_document, make_documents, pack_all
from truestep.rollouts.fields import names_in_has
from truestep.rollouts.packing import first_fit_decreasing, pack, split_to_multiple
from truestep.step.plan.plan import make_plan
from truestep.types import PackedLabels, PackedTokens, Rollout

BUDGET = 24
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=30)


@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_every_document_once_within_the_budget_and_in_order(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, BUDGET)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(members for members in bins)
    assert all(sum(lengths[index] for index in members) <= BUDGET for members in bins)
    assert all(members == sorted(members) for members in bins)
    assert [members[0] for members in bins] == sorted(members[0] for members in bins)
    assert bins == first_fit_decreasing(tuple(lengths), BUDGET)


@settings(max_examples=300, deadline=None)
@given(LENGTHS)
def test_micro_batches_are_few(lengths: list[int]) -> None:
    """First fit decreasing needs at most 11/9 of the optimum + 6/9; the optimum is found here by search."""
    found = len(first_fit_decreasing(lengths, BUDGET))
    lower = max(math.ceil(sum(lengths) / BUDGET), sum(2 * length > BUDGET for length in lengths))
    # No two micro-batches could be put together, so all but one are on average more than half full.
    assert lower <= found <= max(1, math.ceil(2 * sum(lengths) / BUDGET)) if lengths else found == 0
    if len(lengths) <= 8:
        assert found <= math.floor(11 / 9 * _optimum(lengths, BUDGET) + 6 / 9)


def _optimum(lengths: list[int], budget: int) -> int:
    best = len(lengths)

    def place(remaining: list[int], room: list[int]) -> None:
        nonlocal best
        if len(room) >= best:
            return
        if not remaining:
            best = len(room)
            return
        first, rest = remaining[0], remaining[1:]
        for at, space in enumerate(room):
            if first <= space:
                place(rest, [*room[:at], space - first, *room[at + 1 :]])
        place(rest, [*room, budget - first])

    place(sorted(lengths, reverse=True), [])
    return best


def test_the_longest_go_first_and_ties_keep_their_order() -> None:
    # 7 alone leaves room for the 3; the two 5s share one; the later 3 opens a third.
    assert first_fit_decreasing([3, 5, 7, 5, 3], 10) == [[0, 2], [1, 3], [4]]
    assert first_fit_decreasing([2, 2, 2, 2], 4) == [[0, 1], [2, 3]]


def test_a_document_longer_than_a_micro_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="document 1 of 11 tokens is longer than a micro-batch of 10"):
        first_fit_decreasing([4, 11], 10)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_splitting_reaches_the_multiple_and_keeps_every_document(lengths: list[int], multiple: int) -> None:
    bins = first_fit_decreasing(lengths, BUDGET)
    split = split_to_multiple(bins, lengths, multiple)
    assert len(split) == math.ceil(len(bins) / multiple) * multiple
    assert sorted(index for members in split for index in members) == list(range(len(lengths)))
    filled = [members for members in split if members]
    assert split[len(filled) :] == [[]] * (len(split) - len(filled)), "empty ones come last"
    assert all(members == sorted(members) for members in filled)
    assert [members[0] for members in filled] == sorted(members[0] for members in filled)
    # Each part comes of one micro-batch, so no budget is exceeded; empty ones only where documents ran out.
    assert all(any(set(members) <= set(whole) for whole in bins) for members in filled)
    assert len(filled) == min(len(split), len(lengths)) or len(split) == len(filled)
    assert split == split_to_multiple(bins, lengths, multiple)


def test_the_largest_is_halved_near_its_middle() -> None:
    lengths = [1, 1, 9, 9, 4]
    assert split_to_multiple([[0, 1], [2, 3, 4]], lengths, 3) == [[0, 1], [2, 3], [4]]
    assert split_to_multiple([[0, 1, 2, 3, 4]], [2, 2, 2, 2, 2], 2) == [[0, 1, 2], [3, 4]]
    assert split_to_multiple([[0]], [5], 3) == [[0], [], []]


def _by_hand(documents: list[Rollout], padding: int) -> dict[str, list]:
    """Everything that `pack` makes, one token at a time."""
    made: dict[str, list] = {item.name: [] for item in dataclasses.fields(PackedTokens)}
    made |= {item.name: [] for item in dataclasses.fields(PackedLabels)}
    made |= {f"has {name}": [] for name in names_in_has()}
    for name in ("num_segments", "parents", "sequences", "has", "rewards", "fields", "document_fields"):
        del made[name]
    for part in sorted({part for document in documents for part in document.rewards}):
        made[f"rewards {part}"] = [np.float32(document.rewards.get(part, math.nan)) for document in documents]
    made["segments"].append(0)
    for number, document in enumerate(documents):
        before = len(made["input_ids"])
        for position in range(len(document.input_ids)):
            made["input_ids"].append(int(document.input_ids[position]))
            made["position_ids"].append(position)
            if document.loss_mask[position]:
                made["rows"].append(before + position - 1)
                made["ids"].append(int(document.input_ids[position]))
                made["document"].append(number)
                made["temperature"].append(np.float32(document.temperature))
                for name, field in (
                    ("old_logprobs", document.logprobs),
                    ("advantages", document.advantages),
                    ("model_version", document.model_version),
                    ("reference_logprobs", document.reference_logprobs),
                    ("recomputed_logprobs", document.recomputed_logprobs),
                    ("chosen", document.chosen),
                ):
                    made[name].append(0 if field is None else field[position])
        made["segments"].append(len(made["input_ids"]))
        made["num_labels"].append(sum(map(int, document.loss_mask)))
        made["document_labels"].append(sum(map(int, document.loss_mask)))
        made["counts"].append(True)
        made["others_have_advantage"].append(False)
        made["reward"].append(0.0 if document.reward is None else np.float32(document.reward))
        made["has logprobs"].append(document.logprobs is not None)
        made["has advantages"].append(document.advantages is not None)
        made["has model_version"].append(document.model_version is not None)
        made["has reward"].append(document.reward is not None)
        made["has reference_logprobs"].append(document.reference_logprobs is not None)
        made["has recomputed_logprobs"].append(document.recomputed_logprobs is not None)
        made["has truncated"].append(document.truncated is not None)
        made["truncated"].append(document.truncated is True)
    made["position_ids"] += range(padding)
    if padding:
        made["segments"].append(len(made["input_ids"]) + padding)
    return made


DTYPES = {"segments": torch.int32} | dict.fromkeys(
    ("temperature", "old_logprobs", "advantages", "reward", "reference_logprobs", "recomputed_logprobs"), torch.float32
)
DTYPES |= dict.fromkeys(("truncated", "counts", "others_have_advantage"), torch.bool) | {"chosen": torch.uint8}
DTYPES |= dict.fromkeys(("rewards format", "rewards unit"), torch.float32)
DTYPES |= {f"has {name}": torch.bool for name in names_in_has()}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=6),
    st.integers(1, 8),
    st.integers(0, 1000),
    st.randoms(use_true_random=False),
)
def test_tensors_against_plain_loops(shapes: list, multiple: int, seed: int, random) -> None:
    documents = [make_document(f"d{at}", length, seed + at, bare=bare) for at, (length, bare) in enumerate(shapes)]
    chosen = random.sample(range(len(documents)), random.randint(0, len(documents)))
    batch = pack([documents[index] for index in chosen], multiple)
    tokens = sum(documents[index].num_tokens for index in chosen)
    # A micro-batch of no documents is one of padding.
    padding = math.ceil(max(tokens, 1) / multiple) * multiple - tokens
    expected = _by_hand([documents[index] for index in chosen], padding)
    assert len(batch.tokens) == tokens + padding
    assert batch.tokens.num_segments == len(chosen)
    found = vars(batch.tokens) | vars(batch.labels) | {f"has {name}": there for name, there in batch.labels.has.items()}
    found |= {f"rewards {name}": part for name, part in batch.labels.rewards.items()}
    for name, values in expected.items():
        actual = found[name]
        assert actual.dtype == DTYPES.get(name, torch.int64), name
        if name == "input_ids":
            actual = actual[:tokens]
        np.testing.assert_array_equal(actual.tolist(), values, err_msg=name)


def test_padding_is_last_and_no_document_has_it() -> None:
    documents = make_documents([5, 3, 6], seed=4)
    bare, padded = pack_all(documents), pack_all(documents, 16)
    assert bare.tokens.segments.tolist() == [0, 5, 8, 14]
    assert padded.tokens.segments.tolist() == [0, 5, 8, 14, 16]
    assert padded.tokens.num_segments == 3
    for item in dataclasses.fields(PackedLabels):
        without, with_padding = getattr(bare.labels, item.name), getattr(padded.labels, item.name)
        if item.name in ("has", "rewards", "fields", "document_fields"):
            assert without.keys() == with_padding.keys()
            for name in without:
                torch.testing.assert_close(without[name], with_padding[name], rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(without, with_padding), item.name
    assert padded.labels.rows.max() < 14
    assert padded.tokens.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]
    assert pack_all(documents, 7).tokens.segments.tolist() == [0, 5, 8, 14], "no padding segment without padding"


def test_labels_at_the_borders() -> None:
    """A label at position 1, one at the very end, and several spans; the row is the one before, in the document."""
    first = Rollout("a", np.array([10, 11, 12]), np.array([False, True, True]))
    second = Rollout("b", np.array([20]), np.array([False]))
    third = Rollout("c", np.array([30, 31, 32, 33]), np.array([False, True, False, True]))
    no_completion = Rollout("e", np.array([50, 51]), np.arange(2) >= 2)  # prompt_length is the whole length
    labels = pack_all([first, second, third, no_completion]).labels
    assert labels.rows.tolist() == [0, 1, 4, 6]
    assert labels.ids.tolist() == [11, 12, 31, 33]
    assert labels.document.tolist() == [0, 0, 2, 2]
    assert labels.num_labels.tolist() == [2, 0, 2, 0]


def test_a_plan_packs_each_of_its_documents_exactly_once() -> None:
    documents = make_documents([2, 2])
    for wrong in ([[0]], [[0, 0, 1]], [[0, 1, 2]], [[0], [1], [0]]):
        with pytest.raises(ValueError, match="exactly once"):
            make_plan(documents, wrong, 0)
