"""Requests for samples: of short and long prompts, and of several tenants at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tinker.house import House, tenant_of
from truestep.commands.tinker import answers, wire
from truestep.commands.tinker.jobs import Jobs
from truestep.generate.engine.service import EngineGenerator


@pytest.fixture
def house(shared: House) -> Iterator[House]:
    house = shared.of("tml-alice")
    house.begin()
    house.recorded("base_sampler")
    yield house
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    house.clear()


def asked(house: House, ids: list[int], seq: int = 0, **changed: Any) -> Any:
    """The promise of samples of the base model."""
    prompt = {"chunks": [{"tokens": ids, "type": "encoded_text"}]}
    own = {"sampling_session_id": f"{house.session}:sample:1", "prompt": prompt, "seq_id": seq}
    return house.recorded("sample", **{**own, **changed})


def parts_of(message: bytes) -> dict[int, Any]:
    return dict(wire.fields_of(message))


def test_a_prompt_of_one_token(house: House) -> None:
    """Nothing is known of its first token, and the client is told so."""
    targets = {"data": [], "shape": [0, 2], "dtype": "int64"}
    found = parts_of(
        house.result(asked(house, [3], prompt_alt_tokens_k=2, target_prompt_logprobs=targets, topk_sample_logprobs=0))
    )
    assert np.isnan(np.frombuffer(found[2], "<f4")).tolist() == [True]
    top = parts_of(found[3])
    assert (top[3], top[4]) == (2, 1) and np.frombuffer(top[1], "<i4").tolist() == [0, 0]
    assert wire.read_tensor(found[5]).shape == (0, 2)
    assert [wire.read_tensor(value).shape for value in parts_of(found[6]).values()] == [(0, 2)] * 2


def test_what_was_drawn_to_the_longest_can_be_scored(house: House) -> None:
    params = {"temperature": 1.0, "stop": [], "seed": 1}
    drawn = parts_of(house.result(asked(house, [3, 4], sampling_params=params, num_samples=1, topk_sample_logprobs=0)))
    sequence = parts_of(drawn[1])
    ids = [3, 4, *np.frombuffer(sequence[2], "<i4").tolist()]
    assert len(ids) == 63, "of the 64 that are served"
    found = house.result(asked(house, ids, 1, sampling_params={"max_tokens": 1}, num_samples=1))
    logprobs = np.frombuffer(parts_of(found)[2], "<f4")
    np.testing.assert_allclose(logprobs[2:], np.frombuffer(sequence[3], "<f4"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", ["score", "draw"])
def test_one_of_a_batch_fails_alone(where: str, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tenants' requests are computed together, and one of them fails."""
    other = house.of("tml-bob")
    other.begin()
    other.recorded("base_sampler")
    expected = other.result(asked(other, [3, 4, 5]))
    calls: list[int] = []
    if where == "score":
        whole = answers.score

        def score(policy: Any, ids: Any, **options: Any) -> Any:
            if 9 in ids[:1]:
                raise RuntimeError("a planted fault")
            return whole(policy, ids, **options)

        monkeypatch.setattr(answers, "score", score)
    else:
        draw = EngineGenerator.map

        def drawing(self: EngineGenerator, items: Any, *rest: Any) -> Any:
            calls.append(len(items))
            if any(9 in request.token_ids[:1] for _, request in items):
                raise RuntimeError("a planted fault")
            return draw(self, items, *rest)

        monkeypatch.setattr(EngineGenerator, "map", drawing)
    bad, good = asked(house, [9, 4]), asked(other, [3, 4, 5], 1)
    run, sizes = Jobs.run, []

    def counted(self: Jobs, taken: Any) -> None:
        sizes.append(len(taken))
        run(self, taken)

    monkeypatch.setattr(Jobs, "run", counted)
    assert house.result(bad)["category"] == "server"
    drawn, alone = (parts_of(parts_of(raw)[1]) for raw in (other.result(good), expected))
    assert drawn[2] == alone[2] and sizes[0] == 2, "they were computed together"
    found, own = (np.frombuffer(one[3], "<f4") for one in (drawn, alone))
    np.testing.assert_allclose(found, own, rtol=0, atol=1e-5)
    assert calls[:1] in ([], [4])
    other.get(f"sessions/{other.session}/finish", "POST")


def test_a_job_ends_when_its_own_samples_are_there(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"prompt_logprobs": False, "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0}
    short = asked(house, [3, 4], sampling_params={"max_tokens": 1}, **plain)
    long = asked(house, [3, 4], 1, sampling_params={"max_tokens": 40, "stop": []}, **plain)
    order: list[str] = []
    for promise in (long, short):
        job = house.tinker.state.future(tenant_of("tml-alice"), promise["request_id"])
        job.future.add_done_callback(lambda _, name=promise["request_id"]: order.append(name))
    whole = EngineGenerator.map

    def mapped(self: EngineGenerator, *given: Any) -> Any:
        found = whole(self, *given)
        order.append("all are drawn")
        return found

    monkeypatch.setattr(EngineGenerator, "map", mapped)
    house.work()
    assert order == [short["request_id"], long["request_id"], "all are drawn"]


def test_a_turn_draws_so_many_tokens(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.commands.tinker.turns._MOST_DRAWN", 20)
    for seq in range(5):
        asked(house, [3, 4], seq)  # 2 samples of 4 tokens
    state = house.tinker.state
    assert [len(state.take()) for _ in range(4)] == [2, 2, 1, 0]
