"""Packed documents compute what each computes alone, and nothing reaches one document from another or from padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import make_documents, pack_all, same_bits
from oracles.transformer import Transformer
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.mixers.attention import make_layout, packed_attention
from truestep.model.policy import Policy
from truestep.types import PackedTokens, Rollout

# Lengths 1 and long; within a bucket and across buckets; twice the same; longer than every sliding window.
LENGTHS = (7, 1, 40, 2, 17, 1, 3, 18, 40, 5, 64, 33, 1, 16, 22)
DOCUMENTS = make_documents(LENGTHS, seed=11)
HIDDEN = 32
Made = Callable[[str], Path]


# What attention knows of a model: how many heads share keys, a scale of its own, windows, a cap.
@pytest.fixture(scope="module", params=["qwen3", "gemma2", "mistral", "granite"])
def policy(request: pytest.FixtureRequest, tiny_model: Made) -> Policy:
    return load_policy(tiny_model(request.param), device="cpu")


def direction(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5))


def hidden_and_gradients(
    policy: Policy, batch: PackedTokens, tokens: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.weights.zero_gradients()
    hidden = policy.hidden(batch)[:tokens]
    (hidden * direction(tokens)).sum().backward()
    return hidden.detach(), {name: gradient.clone() for name, gradient in policy.weights.gradients.items()}


def alone(policy: Policy, documents: Sequence[Rollout]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Each document in its own pass, by transformers' attention, gradients added up in float64."""
    total = {name: torch.zeros_like(master).double() for name, master in policy.weights.master.items()}
    parts, start = [], 0
    weights = direction(sum(document.num_tokens for document in documents))
    with policy.plain_attention():
        for document in documents:
            policy.weights.zero_gradients()
            input_ids = torch.from_numpy(document.input_ids)[None]
            hidden = policy.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state[0]
            (hidden * weights[start : start + len(hidden)]).sum().backward()
            for name, gradient in policy.weights.gradients.items():
                total[name] += gradient
            parts.append(hidden.detach())
            start += len(hidden)
    return torch.cat(parts), total


@pytest.mark.parametrize("pad_to_multiple", [1, 128])
def test_packed_equals_the_float64_oracle(policy: Policy, pad_to_multiple: int) -> None:
    documents = DOCUMENTS[:10]
    oracle = Transformer(policy.path)
    tokens = sum(document.num_tokens for document in documents)
    with torch.no_grad():
        ours = policy.hidden(pack_all(documents, pad_to_multiple).tokens)[:tokens]
        expected = torch.cat([oracle.hidden_states(document.input_ids.tolist()) for document in documents])
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_packed_equals_each_document_alone(policy: Policy) -> None:
    tokens = sum(LENGTHS)
    hidden, gradients = hidden_and_gradients(policy, pack_all(DOCUMENTS).tokens, tokens)
    expected_hidden, expected = alone(policy, DOCUMENTS)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        scale = expected[name].norm()
        if name != "lm_head.weight":  # hidden states do not depend on it
            assert scale > 1e-3, f"{name}: a trivial gradient would test nothing"
        assert (gradient - expected[name]).norm() <= 1e-5 * scale, name


def poison(batch: PackedTokens, tokens: int, ids: Sequence[int], positions: Sequence[int]) -> PackedTokens:
    def after(values: torch.Tensor, pattern: Sequence[int]) -> torch.Tensor:
        padding = len(values) - tokens
        return torch.cat([values[:tokens], torch.tensor(np.resize(pattern, padding), dtype=torch.int64)])

    return dataclasses.replace(
        batch, input_ids=after(batch.input_ids, ids), position_ids=after(batch.position_ids, positions)
    )


@pytest.mark.parametrize("ids", [(-100,), (10**9, -1), (17, 3, 60), (61, -(2**63), 2**63 - 1)])
def test_nothing_in_the_padding_changes_a_bit(policy: Policy, ids: tuple[int, ...]) -> None:
    documents = DOCUMENTS[:6]
    tokens = sum(document.num_tokens for document in documents)
    batch = pack_all(documents, 97).tokens
    assert len(batch.input_ids) > tokens + 20
    hidden, gradients = hidden_and_gradients(policy, batch, tokens)
    poisoned = poison(batch, tokens, ids, (10**9, 0, -5, 123456))
    poisoned_hidden, poisoned_gradients = hidden_and_gradients(policy, poisoned, tokens)
    assert same_bits(hidden, poisoned_hidden)
    for name, gradient in gradients.items():
        assert same_bits(gradient, poisoned_gradients[name]), name
    # And the padding itself is nothing beyond rounding.
    bare_hidden, bare = hidden_and_gradients(policy, pack_all(documents).tokens, tokens)
    torch.testing.assert_close(hidden, bare_hidden, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        assert (gradient - bare[name]).norm() <= 1e-5 * bare[name].norm(), name


def test_a_document_is_seen_by_itself_alone(policy: Policy) -> None:
    """Every other document's hidden states keep every bit when one is replaced by other tokens."""
    batch = pack_all(DOCUMENTS, 64).tokens
    starts = batch.segments.tolist()
    with torch.no_grad():
        before = policy.hidden(batch)
        for changed in range(len(DOCUMENTS)):
            own = slice(starts[changed], starts[changed + 1])
            input_ids = batch.input_ids.clone()
            input_ids[own] = (input_ids[own] + 7) % 61
            after = policy.hidden(dataclasses.replace(batch, input_ids=input_ids))
            assert not torch.equal(before[own], after[own])
            others = torch.ones(starts[len(DOCUMENTS)], dtype=torch.bool)
            others[own] = False
            real = slice(0, starts[len(DOCUMENTS)])
            assert same_bits(before[real][others], after[real][others])


def test_causal_within_a_document(policy: Policy) -> None:
    batch = pack_all(DOCUMENTS[:3]).tokens
    last = int(batch.segments[3]) - 1
    input_ids = batch.input_ids.clone()
    input_ids[last] = (input_ids[last] + 1) % 61
    with torch.no_grad():
        before, after = policy.hidden(batch), policy.hidden(dataclasses.replace(batch, input_ids=input_ids))
    assert same_bits(before[:last], after[:last])
    assert not torch.equal(before[last], after[last])


# ---- the function itself


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 90), max_size=25))
def test_buckets_hold_every_token_once(lengths: list[int]) -> None:
    segments = torch.tensor([0, *np.cumsum(lengths, dtype=int).tolist()], dtype=torch.int32)
    layout = make_layout(segments, torch.device("cpu"))
    tokens = sum(lengths)
    flat = torch.cat([bucket.queries.flatten() for bucket in layout.rows.buckets] or [torch.zeros(0).long()])
    assert len(set(layout.rows.restore.tolist())) == tokens
    assert flat[layout.rows.restore].tolist() == list(range(tokens)), "restore leads each token back to its own place"
    spans = set(zip(segments[:-1].tolist(), segments[1:].tolist(), strict=True))
    rows = [row for bucket in layout.rows.buckets for row in bucket.queries.tolist()]
    assert len(rows) == len(lengths)
    for row in rows:
        start, end = row[0], max(row) + 1
        assert (start, end) in spans, "a row is one document, from its beginning"
        assert row == [min(start + at, end - 1) for at in range(len(row))], "then its last token again"
    for bucket in layout.rows.buckets:
        shortest = min(len(set(row)) for row in bucket.queries.tolist())
        assert bucket.places is None and torch.equal(bucket.queries, bucket.keys)
        assert bucket.queries.shape[1] <= max(shortest * 4 / 3, 16)
    assert layout.longest == max(lengths, default=0)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale, window, softcap):
    """In float64, one query head and one document at a time: [1, heads, S, E] to [1, S, heads, E]."""
    q, k, v = (tensor[0].double() for tensor in (q, k, v))
    output = torch.zeros(q.shape[1], q.shape[0], q.shape[2], dtype=torch.float64)
    start = 0
    for length in lengths:
        for head in range(q.shape[0]):
            shared = head // (q.shape[0] // k.shape[0])
            for row in range(length):
                first = 0 if window is None else max(0, row - window + 1)
                seen = slice(start + first, start + row + 1)
                scores = k[shared, seen] @ q[head, start + row] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                output[start + row, head] = scores.softmax(0) @ v[shared, seen]
        start += length
    return output[None]


@pytest.mark.parametrize("scores_bytes", [2**28, 1])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 4, 19, 100])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_attention_by_hand(scores_bytes: int, softcap, window, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_SCORES_BYTES", scores_bytes)  # all rows at once, and one by one
    lengths = [5, 1, 20, 19, 3, 5]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, sum(lengths), 8, generator=generator) for heads in (4, 2, 2))
    segments = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    layout = make_layout(segments, torch.device("cpu"))
    output, _ = packed_attention(
        torch.nn.Module(), q, k, v, None, scale, sliding_window=window, softcap=softcap, packed_layout=layout
    )
    expected = by_hand(q, k, v, lengths, 8**-0.5 if scale is None else scale, window, softcap)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_exactly_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    layout = make_layout(torch.tensor([0, 2]), torch.device("cpu"))
    module = torch.nn.Module()
    with pytest.raises(RuntimeError, match="does not pass the packed layout on"):
        packed_attention(module, q, q, q, None)
    with pytest.raises(RuntimeError, match="dropout"):
        packed_attention(module, q, q, q, None, dropout=0.1, packed_layout=layout)
    module.is_causal = False
    with pytest.raises(RuntimeError, match="not causal"):
        packed_attention(module, q, q, q, None, packed_layout=layout)
