"""The engine against a plain loop: the same seed gives the same tokens and log-probs, whatever joins or leaves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from completing import Asked, Completion, How, decode, decode_plainly
from generate.engine.plain_loop import PlainLoop
from tiny import VOCABULARY
from truestep.generate.engine import engine as engine_module
from truestep.generate.engine.draw import DrawRows, draw, key_of
from truestep.generate.engine.engine import Engine, Limits, Session, engine_of
from truestep.generate.engine.schedule import CacheError
from truestep.head.logits import HeadSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.process import progress

Model = Callable[[str], Path]
FAMILIES = ("llama", "qwen3", "qwen3_tied", "gemma2", "granite")


def options(**changes: Any) -> How:
    usual = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "batch_size": None, "stop_ids": frozenset()}
    return How(**(usual | changes))


def requests(lengths: Sequence[int], seed: int = 3) -> list[Asked]:
    generator = np.random.default_rng(seed)
    return [
        Asked(tuple(generator.integers(0, VOCABULARY, length).tolist()), (7, number))
        for number, length in enumerate(lengths)
    ]


def engine_for(policy: Policy) -> Engine:
    engine = engine_of(policy)
    assert isinstance(engine, Engine), engine
    return engine


def run(session: Session) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while session.busy:
        for number, completion in session.step():
            assert number not in done
            done[number] = completion
    return done


def same(mine: Completion, theirs: Completion) -> None:
    assert mine.token_ids == theirs.token_ids
    assert mine.stopped == theirs.stopped
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}])
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_a_plain_loop(kind: str, how: dict[str, Any], tiny_model: Model) -> None:
    policy, loop = load_policy(tiny_model(kind), head=HeadSettings(fp32=True)), PlainLoop(tiny_model(kind))
    engine_for(policy)
    asked = requests((3, 17, 1, 17, 9))
    stops = frozenset([4, 9])
    for request, answer in zip(asked, decode(policy, asked, options(**how, stop_ids=stops)), strict=True):
        tokens, logprobs, cut = loop.sample(request.input_ids, request.seed, 12, stop_ids=stops, **how)
        assert answer.token_ids == tokens
        assert answer.stopped == (tokens[-1] in stops)
        np.testing.assert_allclose(answer.logprobs, logprobs, rtol=0, atol=1e-5)
        if "top_p" in how:
            np.testing.assert_allclose(answer.truncated_logprobs, cut, rtol=0, atol=1e-5)
        else:
            assert answer.truncated_logprobs is None


@pytest.mark.parametrize("cut", [{"top_k": 5}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7, "min_p": 0.1}, {"top_k": 1}])
def test_truncated_draws_are_those_of_a_plain_loop(cut: dict[str, Any], tiny_model: Model) -> None:
    policy, loop = load_policy(tiny_model("llama")), PlainLoop(tiny_model("llama"))
    asked = requests((4, 8, 2))
    for one in (decode, decode_plainly):
        for request, answer in zip(asked, one(policy, asked, options(temperature=1.3, **cut)), strict=True):
            tokens, logprobs, left = loop.sample(request.input_ids, request.seed, 12, temperature=1.3, **cut)
            assert answer.token_ids == tokens
            np.testing.assert_allclose(answer.logprobs, logprobs, rtol=0, atol=1e-5)
            np.testing.assert_allclose(answer.truncated_logprobs, left, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_a_plain_batch_draws_the_same(kind: str, tiny_model: Model) -> None:
    policy = load_policy(tiny_model(kind))
    asked = requests((3, 17, 1, 9))
    how = options(stop_ids=frozenset(range(5)))
    for mine, theirs in zip(decode(policy, asked, how), decode_plainly(policy, asked, how), strict=True):
        same(mine, theirs)


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> tuple[Policy, list[Asked], list[Completion]]:
    """A policy with windows, requests some of which share their prompts, and their completions one by one."""
    policy = load_policy(tiny_model("gemma2"))
    asked = requests((3, 21, 1, 9, 12, 2, 5, 8))
    asked += [Asked(asked[number].input_ids, (8, number)) for number in (1, 1, 3)]
    ends = options(max_new_tokens=14, stop_ids=frozenset(range(3)))
    return policy, asked, [decode(policy, [request], ends)[0] for request in asked]


@given(
    order=st.permutations(range(11)),
    later=st.lists(st.integers(0, 4), min_size=11, max_size=11),
    cancel=st.dictionaries(st.integers(0, 10), st.integers(0, 12), max_size=4),
    rows=st.integers(1, 6),
    pages=st.sampled_from([3, 4, 7, 40]),
    chunk=st.integers(3, 40),
    lag=st.integers(0, 2),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_company_changes_nothing(
    order: list[int],
    later: list[int],
    cancel: dict[int, int],
    rows: int,
    pages: int,
    chunk: int,
    lag: int,
    alone: tuple[Policy, list[Asked], list[Completion]],
) -> None:
    """Requests come in any order and at any time, leave early, in a cache that may be too small for them together, in
    chunks, and the host learns of draws late."""
    policy, asked, expected = alone
    ends = options(max_new_tokens=14, stop_ids=frozenset(range(3)))
    engine = engine_for(policy)
    each = sum(layer.numbers for layer in engine.layers) * 4 * engine.device.page_size
    done: dict[int, Completion] = {}
    before, engine.device.lag = engine.device.lag, lag
    try:
        with engine.session(policy, Limits(rows, 35, chunk, cache_bytes=(pages + 1) * each)) as session:
            assert session.counts.pages == min(pages, rows * 3 + rows * 3 // 15)
            left = dict(cancel)
            waiting = list(zip(order, later, strict=True))
            clock = 0
            while waiting or session.busy:
                while waiting and (waiting[0][1] <= clock or not session.busy):
                    session.submit(waiting[0][0], asked[waiting[0][0]].request(ends))
                    waiting.pop(0)
                for number in [number for number, at in left.items() if at <= clock]:
                    session.cancel(number)
                    del left[number]
                if session.busy:
                    done |= dict(session.step())
                clock += 1
    finally:
        engine.device.lag = before
    for number, completion in done.items():
        same(completion, expected[number])
    assert set(range(11)) - set(cancel) <= set(done)


def test_a_full_cache_is_survived(alone: tuple[Policy, list[Asked], list[Completion]]) -> None:
    policy, asked, expected = alone
    engine = engine_for(policy)
    each = sum(layer.numbers for layer in engine.layers) * 4 * engine.device.page_size
    with engine.session(policy, Limits(6, 35, cache_bytes=5 * each)) as session:
        for number, request in enumerate(asked):
            session.submit(number, request.request(options(max_new_tokens=14, stop_ids=frozenset(range(3)))))
        done = run(session)
        assert session.counts.pages == 4
        assert session.counts.preemptions > 0
    for number, completion in enumerate(expected):
        same(done[number], completion)


def test_a_prompt_longer_than_the_cache_is_named(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"))
    engine = engine_for(policy)
    each = sum(layer.numbers for layer in engine.layers) * 4 * engine.device.page_size
    (long,) = requests((60,))
    with engine.session(policy, Limits(2, 72, cache_bytes=3 * each)) as session:
        with pytest.raises(CacheError, match="prompt of 60 tokens with 12 new ones .* holds 32 tokens"):
            session.submit(0, long.request(options()))
        session.submit(1, requests((4,))[0].request(options()))
        assert len(run(session)[1].token_ids) == 12


def test_a_groups_prompt_is_computed_once(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("qwen3"))
    (one,) = requests((37,))
    group = [Asked(one.input_ids, (5, number)) for number in range(8)]
    with engine_for(policy).session(policy, Limits(8, 50)) as session:
        for number, request in enumerate(group):
            session.submit(number, request.request(options()))
        done = run(session)
        assert session.counts.prompt_tokens == 37
        # Two full pages of the prompt are shared; each has its own after them.
        assert session.counts.most_pages <= 2 + 1 + 8 * 2
    assert len({tuple(completion.token_ids) for completion in done.values()}) == 8
    for number, request in enumerate(group):
        same(done[number], decode(policy, [request], options())[0])


def test_as_many_prompts_as_there_are_rows_are_computed_in_one_step(tiny_model: Model) -> None:
    """None is left for a second round, which would take as many steps again."""
    policy = load_policy(tiny_model("llama"))
    with engine_for(policy).session(policy, Limits(64, 16)) as session:
        for number, request in enumerate(requests([6] * 64)):
            session.submit(number, request.request(options(max_new_tokens=10)))
        assert len(run(session)) == 64
        assert session.counts.steps == 10


@pytest.mark.parametrize("seed", [(0,), (0, 0), (7, 2**32 - 1), (2**32, 1), (2**70,), (1, 2, 3, 4, 5)])
def test_the_key_of_a_completion_is_numpys(seed: tuple[int, ...]) -> None:
    expected = np.random.SeedSequence(list(seed)).generate_state(1, np.uint64)[0]
    assert key_of(seed) % 2**64 == int(expected)


def test_greedy_rows_are_the_same_beside_others() -> None:
    """Alone they need no random number."""
    logits = torch.randn(6, VOCABULARY, generator=torch.manual_seed(0)).round(decimals=1)  # with ties
    rows = [torch.arange(6), torch.zeros(6, dtype=torch.int64)]
    greedy = draw(logits.clone(), DrawRows(*rows, torch.zeros(6)), HeadSettings())
    mixed = draw(logits.clone(), DrawRows(*rows, torch.tensor([0, 1.0, 0, 0, 1, 0])), HeadSettings())
    kept = [0, 2, 3, 5]
    assert torch.equal(greedy.packed[:, kept], mixed.packed[:, kept])


def test_a_temperature_that_float32_does_not_know_is_none() -> None:
    logits = torch.randn(3, VOCABULARY, generator=torch.manual_seed(0))
    rows = [torch.arange(3), torch.zeros(3, dtype=torch.int64)]
    found = draw(logits.clone(), DrawRows(*rows, torch.full((3,), 1e-50, dtype=torch.float64)), HeadSettings())
    assert torch.equal(found.packed, draw(logits.clone(), DrawRows(*rows, torch.zeros(3)), HeadSettings()).packed)


def test_completions_are_handed_over_as_soon_as_each_ends(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"))
    asked = requests((3, 4, 5, 6))
    before = progress.amounts().get("tokens", 0)
    seen: list[tuple[int, Completion, float]] = []
    completions = decode(
        policy,
        asked,
        options(max_new_tokens=30, stop_ids=frozenset(range(0, VOCABULARY, 12))),
        lambda number, completion: seen.append((number, completion, progress.amounts()["tokens"] - before)),
    )
    assert {number: completion for number, completion, _ in seen} == dict(enumerate(completions))
    assert [len(completion.token_ids) for _, completion, _ in seen] == sorted(
        len(completion.token_ids) for completion in completions
    )
    made = sum(len(completion.token_ids) for completion in completions)
    assert seen[0][2] < seen[-1][2] == made


def test_the_engine_goes_with_its_policy_and_the_cache_with_its_phase(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"))
    engine = weakref.ref(engine_for(policy))
    with engine_for(policy).session(policy, Limits(2, 20)) as session:
        session.submit(0, requests((3,))[0].request(options(max_new_tokens=4)))
        run(session)
        assert session.cache is not None
        cache = weakref.ref(session.cache.keys[0])
    assert cache() is None
    del session, policy
    gc.collect()
    assert engine() is None


@pytest.mark.long
def test_a_thousand_phases_leave_nothing_behind(tiny_model: Model) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    policy = load_policy(tiny_model("llama"))
    asked = requests((3, 9))
    for _ in range(100):
        decode(policy, asked, options(max_new_tokens=2))
    before = resident()
    for _ in range(1000):
        decode(policy, asked, options(max_new_tokens=2))
    assert (resident() - before) * 4096 < 8 * 2**20


def test_a_model_that_keeps_other_state_is_sampled_plainly_and_the_reason_is_said(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load_policy(tiny_model("llama"))
    asked = requests((3, 9, 5))
    expected = decode(load_policy(tiny_model("llama")), asked, options())
    policy.model.base_model.layers[1].self_attn.layer_idx = 0
    assert "attends more than once in layer 0" in str(engine_of(policy))
    policy.model.base_model.layers[1].self_attn.layer_idx = 1
    assert caplog.text.count("sampled without the engine") == 1
    for mine, theirs in zip(decode(policy, asked, options()), expected, strict=True):
        same(mine, theirs)
    assert caplog.text.count("sampled without the engine") == 1

    wrong = load_policy(tiny_model("llama"))
    attend = engine_module.run_model
    monkeypatch.setattr("truestep.generate.engine.forward.run_model", lambda *arguments: attend(*arguments) * 1.01)
    assert "differ by 1e-02 from those of training" in str(engine_of(wrong))


def test_bfloat16_stays_near_float32(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("qwen3_tied"), dtype="bfloat16", head=HeadSettings(fp32=True))
    engine_for(policy)
    asked = requests((3, 17, 9))
    loop = PlainLoop(tiny_model("qwen3_tied"))
    for request, answer in zip(asked, decode(policy, asked, options()), strict=True):
        ids = [*request.input_ids, *answer.token_ids]
        for at, logprob in enumerate(answer.logprobs, len(request.input_ids)):
            z = torch.from_numpy(loop.logits(ids[:at]))
            assert logprob == pytest.approx(float(z.log_softmax(-1)[ids[at]]), abs=0.15)
