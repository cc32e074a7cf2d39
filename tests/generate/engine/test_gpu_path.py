"""The engine's path on a GPU, walked without one: kernels in Triton's interpreter, steps that are replayed from memory
that stays where it is, draws that the host learns of late, and compiled layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from completing import Asked, How, decode
from interpreted import use
from selection import in_tiers, long_except
from tiny import VOCABULARY
from truestep.generate.engine import attend as attend_module
from truestep.generate.engine import engine as engine_module
from truestep.generate.engine.attend import KeyPlaces
from truestep.generate.engine.cache import store
from truestep.generate.engine.device import Result
from truestep.generate.engine.engine import Engine, engine_of
from truestep.generate.engine.graphs import FlatPrompts, Graphs, length_for, size_for
from truestep.head.logits import HeadSettings
from truestep.model.fast import compiled
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.step.compute.exact import score_exactly
from truestep.types import Rollout

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands for a GPU where there is none")

Model = Callable[[str], Path]


@dataclass
class Replay:
    """Does again what was done when it was made, on the same memory, as a CUDA graph does."""

    work: Callable[[], torch.Tensor]
    output: torch.Tensor

    def replay(self) -> None:
        self.output.copy_(self.work())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return replay(monkeypatch)


def replay(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Have replays in the place of graphs; give what is captured."""
    made: list[tuple[Any, ...]] = []
    now: dict[str, Any] = {}  # the session's own steps: its cache is read from where `Graphs` says it is
    run, run_prompts, make = Graphs.run, Graphs.run_prompts, Graphs._make

    def run_noting(self: Graphs, lines: Any, longest: int, *step: Any) -> Any:
        *others, now["rows"] = step
        return run(self, lines, longest, *others, lambda *values: now["rows"](*values))

    def run_prompts_noting(self: Graphs, prompts: Any, send: Any, compute: Any) -> Any:
        now["prompts"] = compute
        return run_prompts(self, prompts, send, lambda *values: now["prompts"](*values))

    def make_noting(self: Graphs, key: tuple[Any, ...], work: Any) -> None:
        made.append(key)
        make(self, key, work)

    def capture(self: Graphs, work: Callable[[], torch.Tensor]) -> Any:
        output = work()
        return Replay(work, output), output

    monkeypatch.setattr(Graphs, "run", run_noting)
    monkeypatch.setattr(Graphs, "run_prompts", run_prompts_noting)
    monkeypatch.setattr(Graphs, "_make", make_noting)
    monkeypatch.setattr(Graphs, "_capture", capture)
    return made


def as_on_a_gpu(engine: Engine) -> Engine:
    from truestep.generate.engine import attend_kernels, draw_kernels

    engine.device.attend, engine.device.draw = attend_kernels.attend, draw_kernels.draw
    engine.device.store = attend_kernels.store
    return in_graphs(engine)


def in_graphs(engine: Engine) -> Engine:
    """Have steps be graphs, and their draws be known late."""
    engine.device.lag = 2
    engine.device.fetch = lambda tensor: Result(tensor.clone())  # a GPU's copy is made before the next step begins
    engine.graphs = Graphs(engine.device.place, len(engine.layers), engine.team)
    return engine


@pytest.mark.parametrize(("kind", "cut"), long_except([("gemma2", {}), ("qwen3", {"top_p": 0.8})], ("gemma2", {})))
def test_kernels_and_replays_draw_the_same(
    kind: str, cut: dict[str, float], tiny_model: Model, replays: list[tuple[Any, ...]]
) -> None:
    generator = np.random.default_rng(5)
    lengths = (3, 17, 1)
    asked = [Asked(tuple(generator.integers(0, VOCABULARY, n).tolist()), (n, at)) for at, n in enumerate(lengths)]
    how = How(0.9, cut.get("top_p", 1.0), 5, 2, frozenset(range(6)))
    expected = decode(load_policy(tiny_model(kind)), asked, how)
    policy = load_policy(tiny_model(kind))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    for phase in range(2):
        for mine, theirs in zip(decode(policy, asked, how), expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
        if phase == 0:
            first = list(replays)
            assert len(set(first)) == len(first)
            assert {key[:2] for key in first} == {("rows", 2)}
    # A second phase has its cache elsewhere; it needs the same replays no matter that the first one's cache is gone.
    assert replays == first


@pytest.mark.parametrize("kind", in_tiers(["qwen3", "mistral"], [], ["mistral"]))
def test_prompts_that_are_replayed_draw_the_same(
    kind: str, tiny_model: Model, replays: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that attends within all documents is stood for by one that reads where they end when it runs."""
    generator = np.random.default_rng(5)
    lengths = (30, 47, 1, 9, 60, 12, 3, 200, 8, 17)
    asked = [Asked(tuple(generator.integers(0, VOCABULARY, n).tolist()), (n, at)) for at, n in enumerate(lengths)]
    how = How(0.9, 1.0, 3, 3, frozenset())
    expected = decode(load_policy(tiny_model(kind)), asked, how)
    policy = load_policy(tiny_model(kind))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    found.device.fused, found.device.store = True, store  # the kernel that stores is slow when interpreted

    def by_segments(q: Any, k: Any, v: Any, layout: Any, scale: float, window: int | None, sinks: None) -> torch.Tensor:
        outputs = []
        for start, end in itertools.pairwise(layout.segments.tolist()):
            if end > start:
                one = attention.make_layout(torch.tensor([0, end - start]), q.device)
                parts = (tensor[start:end] for tensor in (q, k, v))
                outputs.append(attention._rows(*parts, one, scale, window, None))
        assert layout.longest >= max(map(len, outputs))
        return torch.cat(outputs)

    monkeypatch.setattr(attention, "is_fused", lambda *_: True)
    monkeypatch.setattr(attention, "_varlen", by_segments)
    for _ in range(2):
        for mine, theirs in zip(decode(policy, asked, how), expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
    prompts = [key for key in replays if key[0] == "prompts"]
    assert prompts and len(set(prompts)) == len(prompts)
    assert all(size in (128, 256, 512) for _, size, _, _ in prompts)


@pytest.mark.parametrize("kind", in_tiers(["qwen3", "mistral"], [], ["mistral"]))
def test_chunks_behind_earlier_tokens_are_replayed(
    kind: str, tiny_model: Model, replays: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that attends to earlier tokens is stood for by plain torch that reads all lengths when it runs."""
    generator = np.random.default_rng(6)
    first = [tuple(generator.integers(0, VOCABULARY, n).tolist()) for n in (70, 40)]
    others = [tuple(generator.integers(0, VOCABULARY, n).tolist()) for n in (1, 9, 30, 50)]
    prompts = [*first, first[0][:64] + others[1], first[0] + others[2], first[1][:33] + others[3], others[0]]
    asked = [Asked(ids, (at,)) for at, ids in enumerate(prompts)]
    how = How(0.9, 1.0, 3, 6, frozenset())
    expected = decode(load_policy(tiny_model(kind)), asked, how)
    policy = load_policy(tiny_model(kind))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    found.device.fused, found.device.past, found.device.store = True, True, store

    def one_by_one(
        q: Any, k: Any, v: Any, bounds: Any, longest: tuple[int, int], scale: float, window: int | None, *sinks: None
    ) -> torch.Tensor:
        spans = [list(itertools.pairwise(each.tolist())) for each in bounds]
        assert len(spans[0]) == len(spans[1]) and spans[0][-1][1] == len(q)
        outputs = []
        for (a, b), (c, d) in zip(*spans, strict=True):
            assert b - a <= min(longest[0], d - c) and d - c <= longest[1] and d <= len(k)
            if b > a:
                query, key, value = q[a:b].transpose(0, 1), k[c:d].transpose(0, 1), v[c:d].transpose(0, 1)
                seen = attend_module.see_earlier(query, key, value, d - c - (b - a), scale, window, None)
                outputs.append(seen.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(attend_module, "attend_to_past", one_by_one)
    for phase in range(2):
        for mine, theirs in zip(decode(policy, asked, how), expected, strict=True):
            assert mine.token_ids == theirs.token_ids
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
        if phase == 0:
            made = [key for key in replays if key[0] == "prompts"]
    assert [key[4:] for key in made] == [(8192,)]  # one pass, behind earlier tokens
    assert [key for key in replays if key[0] == "prompts"] == made


def test_keys_of_a_pass_are_padded_as_its_tokens() -> None:
    spans = [(0, 5, (3,)), (16, 7, (3, 4)), (32, 1, (3, 4, 9))]
    keys = KeyPlaces.of(spans, 16)
    assert keys.bounds.tolist() == [0, 5, 28, 61] and keys.longest == 33
    assert keys.pages[5:28].tolist() == [3] * 16 + [4] * 7 and keys.offsets[28:61].tolist() == [*range(16)] * 2 + [0]
    bounds = np.array([0, 5, 12, 13], dtype=np.int32)
    zeros = np.zeros(13, dtype=np.int64)
    padded = FlatPrompts(zeros, zeros, zeros, zeros, bounds, 7, spare=50, keys=keys).padded()
    assert padded is not None and padded.keys is not None
    missing = 512 - 13
    assert padded.bounds.tolist() == [0, 5, 12, 13] + [512] * (len(padded.bounds) - 4)
    assert padded.keys.bounds.tolist() == [0, 5, 28, 61] + [61 + missing] * (len(padded.bounds) - 4)
    assert len(padded.keys.pages) == len(padded.keys.offsets) == 8192
    assert set(padded.keys.pages[61:].tolist()) == {50} and not padded.keys.offsets[61:].any()
    many = replace(keys, pages=np.zeros(131_072, dtype=np.int64))
    assert FlatPrompts(zeros, zeros, zeros, zeros, bounds, 7, spare=50, keys=many).padded() is None


@pytest.mark.parametrize(
    "kind", [pytest.param("gemma2", marks=pytest.mark.release), pytest.param("qwen3", marks=pytest.mark.long)]
)
def test_exact_kernels_and_replays_find_trainings_logprobs(
    kind: str, tiny_model: Model, replays: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    use("kernels", monkeypatch)
    monkeypatch.setattr(engine_module, "make_exact", lambda *_: None)  # it has a test of its own
    generator = np.random.default_rng(5)
    asked = [Asked(tuple(generator.integers(0, VOCABULARY, n).tolist()), (n, at)) for at, n in enumerate((3, 17, 1))]
    policy = load_policy(tiny_model(kind), head=HeadSettings(fp32=True))
    found = engine_of(policy, exact=True)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    for _ in range(2):  # a second phase has its cache elsewhere
        answers = decode(policy, asked, How(1.0, 1.0, 4, 2, frozenset(range(6)), exact=True))
        documents = []
        for number, (one, answer) in enumerate(zip(asked, answers, strict=True)):
            ids = np.array([*one.input_ids, *answer.token_ids])
            documents.append(Rollout(str(number), ids, np.arange(len(ids)) >= len(one.input_ids)))
        right = score_exactly(policy, documents, [range(3)])
        for number, answer in enumerate(answers):
            assert torch.equal(torch.tensor(answer.logprobs), right[number])
    assert {key[:2] for key in replays} == {("rows", 2)}


def test_weights_that_moved_make_graphs_anew(tiny_model: Model, replays: list[tuple[Any, ...]]) -> None:
    policy = load_policy(tiny_model("llama"))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    asked = [Asked((1, 2, 3), (1,))]
    how = How(1.0, 1.0, 4, None, frozenset())
    decode(policy, asked, how)
    before = len(replays)
    weight = policy.model.base_model.norm.weight
    weight.data = weight.data.clone()
    decode(policy, asked, how)
    assert len(replays) == 2 * before


def test_without_graphs_steps_run_one_by_one(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("capture is not permitted")

    policy = load_policy(tiny_model("llama"))
    asked = [Asked((1, 2, 3), (1,)), Asked((4,), (2,))]
    how = How(1.0, 1.0, 4, None, frozenset())
    expected = decode(policy, asked, how)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(Graphs, "_capture", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    assert [one.token_ids for one in decode(policy, asked, how)] == [one.token_ids for one in expected]
    assert caplog.text.count("computes rows without CUDA graphs") == 1
    assert "capture is not permitted" in caplog.text


def test_layers_of_a_kind_are_compiled_once(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "BACKEND", counter)
    generator = np.random.default_rng(5)
    asked = [Asked(tuple(generator.integers(0, VOCABULARY, 4 + n).tolist()), (n,)) for n in range(9)]
    how = How(1.0, 1.0, 4, None, frozenset())
    policy = load_policy(tiny_model("qwen3"))
    expected = decode(policy, asked, how)
    found = engine_of(policy)
    assert isinstance(found, Engine)
    found.device.compiles = True
    assert [one.token_ids for one in decode(policy, asked, how)] == [one.token_ids for one in expected]
    made = counter.frame_count
    parts = (
        "RoPE, the layer's beginning, before attention, none beside it, after it, the layer's end, and the last norm"
    )
    assert made == 7, parts
    decode(policy, asked[3:], how)
    assert counter.frame_count == made
    assert policy.model.base_model.layers[0].forward.__func__ is type(policy.model.base_model.layers[0]).forward
    torch._dynamo.reset()


def test_batches_are_filled_up_little() -> None:
    for rows in range(1, 1100):
        size = size_for(rows)
        assert rows <= size
        assert size - rows < (128 if rows > 256 else 64 if rows > 32 else 16)
        assert size_for(size) == size
    assert [length_for(longest) for longest in (1, 512, 513, 5000)] == [512, 512, 2048, 8192]
