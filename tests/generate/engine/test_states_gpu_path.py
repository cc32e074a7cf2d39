"""The path of states on a GPU, walked without one: kernels in Triton's interpreter, replays, and compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from completing import Asked, Completion, How, decode
from generate.engine.recurrent_models import FAMILIES, made
from generate.engine.test_gpu_path import as_on_a_gpu, replay
from selection import in_tiers
from tiny import VOCABULARY
from truestep.generate.engine.engine import Engine, engine_of
from truestep.model.fast import compiled
from truestep.model.loading.load import load_policy

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands for a GPU where there is none")
HOW = How(0.9, 1.0, 4, 3, frozenset(range(6)))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return made(tmp_path_factory.mktemp("recurrent"))


def asked_of(lengths: tuple[int, ...]) -> list[Asked]:
    generator = np.random.default_rng(5)
    return [Asked(tuple(generator.integers(0, VOCABULARY, n).tolist()), (n, at)) for at, n in enumerate(lengths)]


def same(found: list[Completion], expected: list[Completion]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, right.logprobs, rtol=0, atol=1e-5)


# A family of each kind of state; what is done where states are not found by address does not depend on the kind.
KINDS = ("lfm2", "falcon_h1", "kimi_linear")
CASES = [(family, addressed) for family in FAMILIES for addressed in (True, False)]


@pytest.mark.parametrize(
    ("family", "addressed"),
    in_tiers(CASES, [case for case in CASES if case[0] == "qwen3_5_text"], [(kind, True) for kind in KINDS]),
)
def test_kernels_and_replays_draw_the_same(
    family: str, addressed: bool, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a second phase, whose states lie elsewhere: they are found by address, or what was captured is dropped.
    Rows are padded to two and four."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from truestep.generate.engine import recur_kernels

    replays = replay(monkeypatch)
    asked = asked_of((3, 17, 1))
    expected = decode(load_policy(model_of(family)), asked, HOW)
    policy = load_policy(model_of(family))
    found = engine_of(policy)
    assert isinstance(found, Engine)
    as_on_a_gpu(found)
    if addressed:
        found.device.advance, found.device.addressed = recur_kernels.in_place, True
    found.graphs = found._graphs()
    kept: list[Any] = []  # so that the next phase's memory is another
    for phase in range(2):
        made_new = PagedStates(monkeypatch, kept)
        same(decode(policy, asked, HOW), expected)
        assert made_new.count > 0
        if phase == 0:
            first = list(replays)
            assert first and len(set(first)) == len(first)
    assert replays == (first if addressed else first * 2)


class PagedStates:
    """Keeps the caches that are made, so that their memory is not used again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kept: list[Any]):
        from truestep.generate.engine.cache import PagedCache

        self.count = 0
        make = PagedCache.make

        def keeping(*arguments: Any, **named: Any) -> PagedCache:
            self.count += 1
            kept.append(make(*arguments, **named))
            return kept[-1]  # type: ignore[no-any-return]

        monkeypatch.setattr(PagedCache, "make", staticmethod(keeping))


@pytest.mark.parametrize("family", in_tiers(FAMILIES, [], [*KINDS, "qwen3_next"], "nightly"))
def test_compiled_layers_draw_the_same(
    family: str, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no batch of another size compiles them again. One token alone would: a GPU's batches have two at least, and
    here all completions take as many steps."""
    whole = replace(HOW, stop_ids=frozenset())
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiled, "BACKEND", counter)
    policy = load_policy(model_of(family))
    asked = asked_of((4, 5, 20))
    expected = decode(policy, asked, whole)
    found = engine_of(policy)
    assert isinstance(found, Engine)
    found.device.compiles = True
    same(decode(policy, asked, whole), expected)
    before = counter.frame_count
    assert before > 0
    same(decode(policy, asked[1:], whole), expected[1:])
    assert counter.frame_count == before
    torch._dynamo.reset()
