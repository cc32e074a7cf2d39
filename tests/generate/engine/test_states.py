"""Models whose layers keep states, sampled by the engine: tokens are those of a plain loop over the model in float64,
whatever joins, leaves, is preempted, shares a prompt or comes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from completing import Asked, Completion, decode
from generate.engine.plain_loop import PlainLoop
from generate.engine.recurrent_models import FAMILIES, made, training_logprobs
from generate.engine.test_engine import engine_for, options, requests, run, same
from selection import long_except
from truestep.generate.engine.cache import LayerShape, PagedCache, states_that_fit
from truestep.generate.engine.engine import Limits, Session, engine_of
from truestep.head.logits import HeadSettings
from truestep.model.cuts.tensor import tensor_plan
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.numerics.operations import InexactError
from truestep.weights.errors import ModelError

Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("recurrent"))


def policy_of(directory: Path) -> Policy:
    return load_policy(directory, head=HeadSettings(fp32=True))


def bytes_of(policy: Policy) -> tuple[int, int]:
    """Give the bytes of a page and those of a sequence's states."""
    engine = engine_for(policy)
    page = sum(layer.numbers for layer in engine.layers) * 4 * engine.device.page_size
    states = [state for layer in engine.layers for state in layer.states]
    return page, sum(int(np.prod(state.shape)) * state.dtype.itemsize for state in states)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_a_plain_loop_and_log_probs_those_of_training(family: str, model_of: Made) -> None:
    policy, loop = policy_of(model_of(family)), PlainLoop(model_of(family))
    assert any(layer.states for layer in engine_for(policy).layers)
    asked = requests((3, 21, 1))
    for how in ({}, {"temperature": 0.0}):
        answers = decode(policy, asked, options(max_new_tokens=8, stop_ids=frozenset([4]), **how))
        for request, answer in zip(asked, answers, strict=True):
            tokens, logprobs, _ = loop.sample(request.input_ids, request.seed, 8, stop_ids=frozenset([4]), **how)
            assert answer.token_ids == tokens
            np.testing.assert_allclose(answer.logprobs, logprobs, rtol=0, atol=1e-5)
            scored = training_logprobs(policy, request.input_ids, answer.token_ids)
            np.testing.assert_allclose(answer.logprobs, scored, rtol=0, atol=1e-5)


Alone = tuple[Policy, list[Asked], list[Completion]]
ENDS = options(max_new_tokens=14, stop_ids=frozenset(range(3)))


@pytest.fixture(scope="module", params=long_except(FAMILIES, "qwen3_5_text"))
def alone(request: pytest.FixtureRequest, model_of: Made) -> Alone:
    """Give requests, some of which share their prompts or begin with another's, and their completions one by one."""
    policy = policy_of(model_of(request.param))
    asked = requests((3, 21, 1, 9, 12, 16))
    asked += [Asked(asked[number].input_ids, (8, number)) for number in (1, 1, 3)]
    asked += [Asked((*asked[number].input_ids, 5, 6, 1), (9, number)) for number in (1, 5)]
    return policy, asked, [decode(policy, [one], ENDS)[0] for one in asked]


@given(
    order=st.permutations(range(11)),
    later=st.lists(st.integers(0, 4), min_size=11, max_size=11),
    cancel=st.dictionaries(st.integers(0, 10), st.integers(0, 12), max_size=4),
    rows=st.integers(1, 6),
    pages=st.sampled_from([3, 4, 7, 40]),
    states=st.integers(2, 9),
    chunk=st.integers(3, 40),
    lag=st.integers(0, 2),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_company_changes_nothing(
    order: list[int],
    later: list[int],
    cancel: dict[int, int],
    rows: int,
    pages: int,
    states: int,
    chunk: int,
    lag: int,
    alone: Alone,
) -> None:
    policy, asked, expected = alone
    engine = engine_for(policy)
    done: dict[int, Completion] = {}
    before, engine.device.lag = engine.device.lag, lag
    try:
        with session_with(policy, rows, pages, states, chunk) as session:
            left, waiting, clock = dict(cancel), list(zip(order, later, strict=True)), 0
            while waiting or session.busy:
                while waiting and (waiting[0][1] <= clock or not session.busy):
                    session.submit(waiting[0][0], asked[waiting[0][0]].request(ENDS))
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


def session_with(policy: Policy, rows: int, pages: int, states: int, chunk: int | None = None) -> Any:
    """Open a session of so many pages and states, whatever would be useful."""
    patched = pytest.MonkeyPatch()
    module = "truestep.generate.engine.engine."
    patched.setattr(module + "pages_that_fit", lambda *unused: pages)
    patched.setattr(module + "states_that_fit", lambda *unused: states)

    class Opened:
        def __enter__(self) -> Session:
            self.session = engine_for(policy).session(policy, Limits(rows, 50, chunk))
            return self.session.__enter__()

        def __exit__(self, *error: Any) -> None:
            patched.undo()
            self.session.__exit__(*error)

    return Opened()


def test_a_full_cache_is_survived(alone: Alone) -> None:
    policy, asked, expected = alone
    with session_with(policy, 6, 4, 7) as session:
        for number, request in enumerate(asked):
            session.submit(number, request.request(ENDS))
        done = run(session)
        assert session.counts.preemptions > 0
    for number, completion in enumerate(expected):
        same(done[number], completion)


@pytest.mark.parametrize("length", [32, 37])
def test_a_groups_prompt_is_computed_once_and_its_state_is_copied(length: int, model_of: Made) -> None:
    """Also where the prompt ends within a page, and where it comes in pieces."""
    policy = policy_of(model_of("lfm2"))
    (one,) = requests((length,))
    group = [Asked(one.input_ids, (5, number)) for number in range(6)]
    for chunk in (None, 7):
        with engine_for(policy).session(policy, Limits(4, 50, chunk)) as session:
            for number, request in enumerate(group):
                session.submit(number, request.request(options()))
            done = run(session)
            assert session.counts.prompt_tokens == length
        assert len({tuple(completion.token_ids) for completion in done.values()}) == 6
        for number, request in enumerate(group):
            same(done[number], decode(policy, [request], options())[0])


def test_the_next_turn_computes_what_came_behind_the_last_prompt(model_of: Made) -> None:
    policy = policy_of(model_of("lfm2"))
    ids = requests((37,))[0].input_ids
    with engine_for(policy).session(policy, Limits(2, 120)) as session:
        for turn in range(4):
            before = session.counts.prompt_tokens
            session.submit(turn, Asked(ids, (turn,)).request(options()))
            done = run(session)[turn]
            assert session.counts.prompt_tokens - before == (12 + 3 if turn else 37)
            same(done, decode(policy, [Asked(ids, (turn,))], options())[0])
            ids = (*ids, *done.token_ids, 1, 2, 3)
        assert session.counts.cached_tokens == 37 + 52 + 67


def test_a_spare_state_is_all_that_padding_rows_write(model_of: Made) -> None:
    """A batch that is padded leaves the states of others as they are."""
    policy = policy_of(model_of("lfm2"))
    with engine_for(policy).session(policy, Limits(3, 40)) as session:
        assert session.cache is not None
        for number, request in enumerate(requests((5, 6, 7))):
            session.submit(number, request.request(options()))
        session.step()
        lines = session._rows.lines([], 4, 3, len(session._last) - 1)
        before = [pool[1:].clone() for pool in session.cache.states]
        session._decode(torch.from_numpy(lines), 1)
        for pool, right in zip(session.cache.states, before, strict=True):
            assert torch.equal(pool[1:], right)
        run(session)


def test_states_are_counted_in_what_the_cache_takes(model_of: Made) -> None:
    policy = policy_of(model_of("lfm2"))
    page, state = bytes_of(policy)
    for room in (40 * page + 30 * state, 9 * page + 4 * state, page):
        with engine_for(policy).session(policy, Limits(8, 64, cache_bytes=room)) as session:
            assert session.cache is not None
            counts = [len(pool) - 1 for pool in session.cache.states]
            assert len(set(counts)) == 1 and counts[0] >= 2
            cache = session.cache
            held = sum(one.nbytes for one in (*cache.keys, *cache.values, *cache.states))
            assert held <= max(room, 2 * page + 3 * state)
            assert session._scheduler.slots <= counts[0] - 1


@pytest.mark.parametrize(
    ("rows", "state", "pages", "room", "found"),
    [
        (8, 0, 100, 1000, 0),
        (8, 10, 100, 1000, 18),  # as many are kept as run
        (8, 10, 100, 240, 13),  # the extra one, 10 that are needed, 3 that are kept
        (8, 10, 100, 210, 10),
        (8, 10, 100, 110, 5),  # half of all
        (8, 10, 100, 15, 2),
    ],
)
def test_memory_is_divided_between_pages_and_states(rows: int, state: int, pages: int, room: int, found: int) -> None:
    assert states_that_fit(rows, state, pages, room) == found


def test_a_cache_has_the_states_of_its_layers(model_of: Made) -> None:
    layers = engine_for(policy_of(model_of("lfm2"))).layers
    assert [bool(layer.heads) for layer in layers] == [False, True, False]
    cache = PagedCache.make(layers, 3, 4, torch.float32, torch.device("cpu"), states=5)
    assert [tuple(pool.shape) for pool in cache.states] == [(6, 32, 2)] * 2
    for pool in cache.states:
        pool[1:] = torch.arange(1, 6.0)[:, None, None]
    cache.copy_states(torch.tensor([1, 5]), torch.tensor([5, 2]))
    assert [pool[:, 0, 0].tolist() for pool in cache.states] == [[0, 1, 5, 3, 4, 1]] * 2
    assert isinstance(layers[0], LayerShape)


def test_states_are_float32_in_half_precision_too(model_of: Made) -> None:
    for family, kinds in (("qwen3_5_text", 1), ("nemotron_h", 2)):
        policy = load_policy(model_of(family), dtype="bfloat16")
        types = [[state.dtype for state in layer.states] for layer in engine_for(policy).layers if layer.states]
        assert types == [[torch.bfloat16, torch.float32]] * kinds  # a convolution, and what recurs


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5_text"])
def test_tensor_ranks_are_refused_by_name(family: str, model_of: Made) -> None:
    with pytest.raises(ModelError, match=f"parallel.tensor: {family}"):
        tensor_plan(AutoConfig.from_pretrained(model_of(family)), 2)


def test_exact_is_refused_by_name(model_of: Made) -> None:
    policy = policy_of(model_of("lfm2"))
    with pytest.raises(InexactError, match=r"sampler.exact: .* Lfm2ShortConv"):
        engine_of(policy, exact=True)
