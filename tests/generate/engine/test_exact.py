"""`sampler.exact`: the log-probs that the engine records are those that training finds, to the last bit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from completing import Asked, Completion, How, decode
from selection import long_except
from tiny import VOCABULARY
from truestep.generate.engine import engine as engine_module
from truestep.generate.engine import exact as engine_exact
from truestep.generate.engine.engine import Engine, Limits, engine_of
from truestep.head.logits import HeadSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.numerics.operations import InexactError
from truestep.step.compute.exact import score_exactly
from truestep.types import Rollout

Model = Callable[[str], Path]
FAMILIES = ("llama", "qwen3", "qwen3_tied", "gemma2", "granite")
OPTIONS = How(0.7, 1.0, 14, None, frozenset([3, 8]), exact=True)


def requests() -> list[Asked]:
    """Prompts of uneven lengths, one of them a group's, and one longer than the chunks below."""
    generator = np.random.default_rng(3)
    asked = [
        Asked(tuple(generator.integers(0, VOCABULARY, length).tolist()), (7, number))
        for number, length in enumerate((3, 17, 1, 45, 9, 16))
    ]
    return asked + [Asked(asked[1].input_ids, (8, number)) for number in range(2)]


def trained(policy: Policy, asked: Sequence[Asked], answers: Sequence[Completion]) -> list[np.ndarray]:
    """Training's log-probs of completions, in two micro-batches."""
    documents = []
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = np.array([*request.input_ids, *answer.token_ids])
        mask = np.arange(len(ids)) >= len(request.input_ids)
        documents.append(Rollout(str(number), ids, mask, temperature=OPTIONS.temperature))
    numbers = list(range(len(documents)))
    found = score_exactly(policy, documents, [numbers[::2], numbers[1::2]])
    return [found[number].numpy() for number in numbers]


def equal(policy: Policy, asked: Sequence[Asked], answers: Sequence[Completion]) -> bool:
    return all(
        np.array_equal(np.array(answer.logprobs, dtype=right.dtype), right)
        for answer, right in zip(answers, trained(policy, asked, answers), strict=True)
    )


def in_company(policy: Policy, asked: Sequence[Asked], limits: Limits) -> tuple[list[Completion], Any]:
    """Submit half of the requests, and each of the others some steps later."""
    engine = engine_of(policy, exact=True)
    assert isinstance(engine, Engine)
    done: dict[int, Completion] = {}
    with engine.session(policy, limits) as session:
        waiting = list(range(len(asked)))
        for number in waiting[: len(asked) // 2]:
            session.submit(number, asked[number].request(OPTIONS))
        waiting = waiting[len(asked) // 2 :]
        while session.busy or waiting:
            if (waiting and session.counts.steps % 3 == 2) or not session.busy:
                number = waiting.pop(0)
                session.submit(number, asked[number].request(OPTIONS))
            done |= dict(session.step())
        return [done[number] for number in range(len(asked))], session.counts


@pytest.fixture(autouse=True)
def checked_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Spare the engine's own check here; it has tests of its own."""
    monkeypatch.setattr(engine_module, "make_exact", lambda *_: None)
    return


@pytest.mark.parametrize(
    ("kind", "dtype"),
    long_except(
        itertools.product(FAMILIES, ["bfloat16", "float32"]),
        *itertools.product(FAMILIES, ["bfloat16"]),
        ("gemma2", "float32"),
    ),
)
def test_the_samplers_logprobs_are_trainings(kind: str, dtype: str, tiny_model: Model) -> None:
    policy = load_policy(tiny_model(kind), dtype=dtype, head=HeadSettings(fp32=kind != "qwen3"))
    asked = requests()
    answers = decode(policy, asked, OPTIONS)
    assert equal(policy, asked, answers)
    assert {answer.stopped for answer in answers} == {True, False}
    # Few rows at a time, long prompts in chunks, late joins, and a cache so small that completions begin again.
    small = (
        7 * 16 * sum(layer.numbers for layer in engine_of(policy, exact=True).layers) * policy.weights.dtype.itemsize
    )  # type: ignore[union-attr]
    crowded, counts = in_company(policy, asked, Limits(4, 60, chunk_tokens=13, cache_bytes=small))
    assert counts.preemptions > 0
    for mine, theirs in zip(crowded, answers, strict=True):
        assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_long_documents_too(kind: str, tiny_model: Model) -> None:
    """Of 8k tokens, whose prompts are computed in chunks while another completion is decoded."""
    policy = load_policy(tiny_model(kind), dtype="bfloat16", head=HeadSettings(fp32=True))
    generator = np.random.default_rng(5)
    lengths = 8178, 30, 7001
    asked = [
        Asked(tuple(generator.integers(0, VOCABULARY, length).tolist()), (9, number))
        for number, length in enumerate(lengths)
    ]
    answers, counts = in_company(policy, asked, Limits(4, 8192, chunk_tokens=1000))
    assert counts.prompt_tokens == sum(lengths)
    assert equal(policy, asked, answers)


def test_without_it_bfloat16_differs(tiny_model: Model) -> None:
    """The comparison can fail."""
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", head=HeadSettings(fp32=True))
    asked = requests()
    assert not equal(policy, asked, decode(policy, asked, replace(OPTIONS, exact=False)))


def test_it_stays_near_what_is_sampled_without_it(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("gemma2"), head=HeadSettings(fp32=True))
    asked = requests()
    exact, plain = (decode(policy, asked, replace(OPTIONS, exact=which)) for which in (True, False))
    for mine, theirs in zip(exact, plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=0, atol=1e-5)


def test_truncated_draws_have_both_logprobs(tiny_model: Model) -> None:
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", head=HeadSettings(fp32=True))
    asked = requests()
    answers = decode(policy, asked, replace(OPTIONS, top_k=4))
    assert equal(policy, asked, answers)
    for answer in answers:
        assert answer.truncated_logprobs is not None
        assert all(cut >= whole for cut, whole in zip(answer.truncated_logprobs, answer.logprobs, strict=True))


def test_the_engine_compares_itself_with_training(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "make_exact", engine_exact.make_exact)
    policy = load_policy(tiny_model("qwen3"), dtype="bfloat16", head=HeadSettings(fp32=True))
    assert isinstance(Engine(policy, exact=True), Engine)
    honest = engine_exact.rows_pass

    def wrong(*places: Any, **options: Any) -> Any:
        """Single tokens see one key more than they should."""
        return honest(*places, **(options | {"before": options["before"] + 1}))

    monkeypatch.setattr(engine_exact, "rows_pass", wrong)
    with pytest.raises(InexactError, match="differ from training's"):
        Engine(policy, exact=True)


def test_a_model_that_it_cannot_compute_is_refused_by_name(tiny_model: Model, caplog: pytest.LogCaptureFixture) -> None:
    policy = load_policy(tiny_model("llama"), dtype="bfloat16", head=HeadSettings(fp32=True))
    norm = policy.model.base_model.norm
    own = norm.forward
    norm.forward = lambda hidden: own(hidden) + 0 * hidden.mean(-2, keepdim=True)
    with caplog.at_level(logging.WARNING), pytest.raises(InexactError, match="another dimension than the last"):
        decode(policy, requests(), OPTIONS)
