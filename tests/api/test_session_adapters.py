"""Several adapters over one model: each is, bit for bit, what it would be alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import read_weights
from documents import same_bits
from ranks.cases import on_ranks
from small_runs import file_config, word_model, write_rollouts
from tiny import make_model
from truestep import Session
from truestep.commands.session.errors import SessionError
from truestep.config.schema import Config

ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"rank": 4, "alpha": 8.0, "seed": 3},
    "two": {"rank": 2, "targets": ["q_proj", "down_proj"], "seed": 9},
}


def options(tmp_path: Path, model: Path | None = None, **sections: Any) -> tuple[Config, list[dict[str, Any]]]:
    if model is None:
        model = tmp_path / "model"
        make_model(model, "llama")
    records = write_rollouts(tmp_path / "rollouts.jsonl", 16)
    sections = {"adapter": {"rank": 8}, "optimizer": {"learning_rate": 1e-2}, **sections}
    return file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections), records


def alone(config: Config, name: str) -> Session:
    given = dict(ADAPTERS[name])
    seed = given.pop("seed")
    return Session(config.changed({"seed": seed, **{f"adapter.{key}": value for key, value in given.items()}}))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_trained_in_turn_are_each_what_they_would_be_alone(dtype: str, tmp_path: Path) -> None:
    config, records = options(tmp_path)
    config = config.changed({"model.dtype": dtype})
    calls = [("one", records[:4]), ("two", records[4:8]), ("one", records[8:12]), ("two", records[:8])]
    lines: dict[str, list[Any]] = {"one": [], "two": []}
    with Session(config) as session:
        adapters = {name: session.adapter(name, **given) for name, given in ADAPTERS.items()}
        # Gradients of both are open at once.
        for _ in range(2):
            for name, some in calls:
                lines[name].append([score.logprobs.tolist() for score in adapters[name].forward_backward(some)])
            for name, adapter in adapters.items():
                lines[name].append(adapter.step()["grad_norm"])
        assert (session.steps, adapters["one"].steps, adapters["two"].documents_seen) == (0, 2, 24)
        together = {name: read_weights(adapter.save(tmp_path / name)) for name, adapter in adapters.items()}
    for name in ADAPTERS:
        with alone(config, name) as session:
            found: list[Any] = []
            for _ in range(2):
                for some in (some for whose, some in calls if whose == name):
                    found.append([score.logprobs.tolist() for score in session.forward_backward(some)])
                found.append(session.step()["grad_norm"])
            assert found == lines[name]
            assert same(read_weights(session.save(tmp_path / f"{name}-alone")), together[name])


def test_the_weights_of_the_model_are_held_once(tmp_path: Path) -> None:
    config, _ = options(tmp_path)
    with Session(config) as session:
        adapter = session.adapter("one", rank=2)
        own, others = session.policy.weights.frozen, adapter.policy.weights.frozen
        assert own.keys() == others.keys() and len(own) > 10
        assert all(own[name] is others[name] for name in own)
        assert not set(adapter.policy.weights.master) & set(own)
        adapter.load(None)
        session.load(None)
        assert all(
            own[name] is session.policy.weights.frozen[name] is adapter.policy.weights.frozen[name] for name in own
        )


def test_an_adapter_samples_as_a_session_of_that_adapter_alone(tmp_path: Path) -> None:
    config, _ = options(tmp_path, word_model(tmp_path / "words"))
    records = [
        {"input_ids": [3 + n, 7, 9, 12], "prompt_length": 2, "logprobs": [-1.0] * 4, "advantage": 1.0} for n in range(4)
    ]

    def drawn(session: Session) -> Any:
        return [(one.token_ids, one.logprobs) for many in session.sample([[5, 6], [8, 9, 10]], count=3) for one in many]

    with Session(config) as session:
        adapters = {name: session.adapter(name, **given) for name, given in ADAPTERS.items()}
        for adapter in adapters.values():
            adapter.forward_backward(records)
            adapter.step(learning_rate=0.1)
        together = {name: drawn(adapter) for name, adapter in adapters.items()}
    assert together["one"] != together["two"]
    for name in ADAPTERS:
        with alone(config, name) as session:
            session.forward_backward(records)
            session.step(learning_rate=0.1)
            assert drawn(session) == together[name]


def test_an_adapter_is_saved_and_loaded_by_itself(tmp_path: Path) -> None:
    config, records = options(tmp_path)
    with Session(config) as session:
        one, two = (session.adapter(name, **given) for name, given in ADAPTERS.items())
        for adapter in (one, two):
            adapter.forward_backward(records)
            adapter.step()
        checkpoint = one.save(tmp_path / "saved")
        untouched = read_weights(two.save(tmp_path / "before"))
        one.forward_backward(records)
        expected = (one.step()["grad_norm"], read_weights(one.save(tmp_path / "on")))
        one.load(checkpoint)
        one.forward_backward(records)
        assert (one.step()["grad_norm"], one.steps) == (expected[0], 2)
        assert same(read_weights(one.save(tmp_path / "again")), expected[1])
        session.remove("one")
        again = session.adapter("one", weights=checkpoint, **ADAPTERS["one"])
        assert again.steps == 1
        again.forward_backward(records)
        again.step()
        assert same(read_weights(again.save(tmp_path / "anew")), expected[1])
        assert same(read_weights(two.save(tmp_path / "after")), untouched)


def test_an_update_has_the_options_that_it_is_given(tmp_path: Path) -> None:
    config, records = options(tmp_path)
    given = {"beta1": 0.5, "beta2": 0.75, "epsilon": 1e-3, "weight_decay": 0.2, "gradient_clip": 0.05}
    with Session(config.changed({f"optimizer.{name}": value for name, value in given.items()})) as session:
        session.forward_backward(records)
        session.step()
        expected = read_weights(session.save(tmp_path / "expected"))
    with Session(config) as session:
        session.forward_backward(records)
        session.gradient_norm()  # which prepares an update
        session.step(**given)
        assert same(read_weights(session.save(tmp_path / "found")), expected)
        session.forward_backward(records)
        with pytest.raises(SessionError, match="momentum is unknown: it may be beta1, beta2"):
            session.step(momentum=0.5)


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    config, _ = options(tmp_path)
    with Session(config) as session:
        session.adapter("one", rank=2)
        assert session.adapter("one") is session.adapters["one"]
        with pytest.raises(SessionError, match="the adapter one exists already"):
            session.adapter("one", rank=4)
        with pytest.raises(SessionError, match="there is no adapter two: there are one"):
            session.remove("two")
    with Session(config.changed({"adapter": None})) as session:
        with pytest.raises(SessionError, match="no section adapter"):
            session.adapter("one", rank=2)
        with pytest.raises(SessionError, match="none can be shared"):
            Session(config.changed({"adapter": None}), base=session.policy)


def test_asynchronous_twins_are_the_methods(tmp_path: Path) -> None:
    """Two adapters train and sample at once, bit for bit as one after another; meanwhile the event loop goes on."""
    config, records = options(tmp_path)
    draws = {"count": 2, "temperature": 1.0, "max_new_tokens": 3}
    with Session(config) as session:
        found: dict[str, list[Any]] = {}
        for name in ADAPTERS:
            own = session.adapter(name, **ADAPTERS[name])
            own.forward_backward(records)
            norm = own.gradient_norm()
            own.step()
            found[name] = [norm, own.sample([[3, 4]], **draws), read_weights(own.save(tmp_path / name))]
            session.remove(name)
        waits, sees = threading.Event(), threading.Event()

        def waiting(logprobs: Sequence[torch.Tensor], _: Any) -> torch.Tensor:
            waits.set()
            assert sees.wait(60), "the event loop goes on"
            return logprobs[0].sum()

        async def loop(name: str) -> list[Any]:
            own = session.adapter(name, **ADAPTERS[name])
            await own.forward_backward_async(records)
            norm = await own.gradient_norm_async()
            await own.step_async()
            drawn = await own.sample_async([[3, 4]], **draws)
            return [norm, drawn, read_weights(await own.save_async(tmp_path / f"{name} again"))]

        async def both() -> list[list[Any]]:
            slow = session.forward_backward_async(records, waiting)
            while not waits.is_set():
                await asyncio.sleep(0.001)
            sees.set()
            await slow
            with pytest.raises(SessionError, match="is unknown"):
                await session.step_async(momentum=0.5)
            return list(await asyncio.gather(*map(loop, ADAPTERS)))

        for name, again in zip(ADAPTERS, asyncio.run(both()), strict=True):
            assert again[:2] == found[name][:2] and same(again[2], found[name][2]), name


def test_asynchronous_twins_begin_when_they_are_called(tmp_path: Path) -> None:
    """In the order of the calls, whatever the order in which they are awaited, and also if they are not."""
    config, records = options(tmp_path)

    async def inverse(session: Session) -> list[Any]:
        made = [session.forward_backward_async(records[:8]), session.step_async(), session.logprobs_async(records[8:])]
        last, metrics = await made[2], await made[1]
        session.forward_backward_async(records[:8])
        return [[one.tolist() for one in last], metrics["grad_norm"], await session.gradient_norm_async()]

    with Session(config) as session:
        session.forward_backward(records[:8])
        norm = session.step()["grad_norm"]
        expected = [[one.tolist() for one in session.logprobs(records[8:])], norm]
        session.forward_backward(records[:8])
        expected.append(session.gradient_norm())
    with Session(config) as session:
        assert asyncio.run(inverse(session)) == expected


def call_twin(config: dict[str, Any]) -> None:
    async def call(session: Session) -> None:
        with pytest.raises(SessionError, match="for one process"):
            await session.step_async()

    with Session(Config.model_validate(config)) as session:
        asyncio.run(call(session))


@pytest.mark.long
def test_asynchronous_twins_are_refused_on_several_ranks(tmp_path: Path) -> None:
    config, _ = options(tmp_path)
    on_ranks(2, call_twin, config.model_dump(exclude_unset=True) | {"parallel": {"data_shard": 2}})
