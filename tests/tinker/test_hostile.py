"""Bodies that no client sends: each gets an error or an answer, the server goes on, and memory does not grow."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker.house import RECORDED, House, metrics_of, request_of, served_in, tenant_of
from truestep.commands.tinker import accounts, state, wire

ODD: list[Any] = [None, True, -1, 0, 2**40, 2**70, 1.5, 1e308, "", "x" * 300, "../../etc", [], [[]], {}, {"a": {}}]
# What is kept for a tenant has bounds. With these, so many requests reach them all.
SMALL_BOUNDS = {
    accounts: {"_MOST_KEPT": 64, "_MOST_REMEMBERED": 256},
    state: {"_MOST_SESSIONS": 16, "_MOST_MODELS": 4},
}
PROTOS = [name for name, given in RECORDED.items() if "proto" in given]
JSONS = [name for name, given in RECORDED.items() if "json" in given]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("hostile")
    house = served_in(folder, folder / "checkpoints")
    house.make()
    return house


def mutated(message: bytes, draw: random.Random) -> bytes:
    raw = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(raw):
            raw[at] = draw.randrange(256)
        elif kind == 1:
            del raw[at : at + draw.randint(1, 9)]
        elif kind == 2:
            raw[at:at] = draw.randbytes(draw.randint(1, 9))
        else:
            raw[at:] = b""
    return bytes(raw)


def with_odd(value: Any, draw: random.Random) -> Any:
    """A body with one value in it replaced, or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        if draw.random() < 0.15:
            return {key: each for key, each in value.items() if key != name}
        return {**value, name: with_odd(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return [*value[:at], with_odd(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


def of_another(house: House, victim: House, draw: random.Random) -> Any:
    """A request for what is another tenant's."""
    theirs = f"{victim.session}:train:0"
    ways: list[Callable[[], Any]] = [
        lambda: house.send("optim_step", model_id=theirs),
        lambda: house.send("load", model_id=theirs, path=f"tinker://{theirs}/weights/one"),
        lambda: house.send("load", model_seq_id=draw.randrange(99), path=f"tinker://{theirs}/weights/one"),
        lambda: house.send("base_sampler", model_path=f"tinker://{theirs}/weights/one"),
        lambda: house.send("sample", sampling_session_id=f"{victim.session}:sample:0"),
        lambda: house.send("heartbeat", session_id=victim.session),
        lambda: house.send("model", session_id=victim.session, model_seq_id=draw.randrange(9)),
        lambda: house.post("retrieve_future", {"request_id": f"{theirs}:{draw.randrange(1, 4)}"}),
        lambda: house.post("cancel_future", {"request_id": f"{theirs}:2"}),
        lambda: house.post("forward_backward", content=house.message("cross_entropy", seq=4, model=theirs)),
        lambda: house.get(f"sessions/{victim.session}/finish", "POST"),
        lambda: house.get(f"training_runs/{theirs}/checkpoints/weights/one", "DELETE"),
        lambda: house.get(f"training_runs/{theirs}"),
        lambda: house.post("weights_info", {"tinker_path": f"tinker://{theirs}/weights/one"}),
    ]
    return draw.choice(ways)()


def misshapen(house: House, seq: int, draw: random.Random) -> bytes:
    """A whole message whose tensors are of other shapes than its tokens, too large, or out of the vocabulary."""
    tokens, targets = draw.randrange(1, 40), draw.randrange(1, 40)
    ids = [3] * (tokens + (tokens == targets))
    wrong = draw.choice([[4] * targets, [[4] * 2] * targets, [-1] * len(ids), [10**9] * len(ids), np.zeros((2, 3, 4))])
    given: list[tuple[Any, dict[str, Any]]] = draw.choice(
        [
            [(ids, {"target_tokens": wrong})],
            [([3] * 5000, {"target_tokens": [4] * 5000})],
            [([3, 4], {"target_tokens": [4, 5], "weights": np.zeros((300, 300))})],
            [([3, 4], {"target_tokens": [4, 5], "weights": [float("nan"), 1.0]})],
            [([3, 4], {"target_tokens": np.full((2, 2000), 4)})],
            [([3], {"target_tokens": [4]})] * 2000,
            [([], {"target_tokens": []})],
            [([2**31 - 1], {"target_tokens": [4]})],
        ]
    )
    return request_of(f"{house.session}:train:0", seq, given, "cross_entropy")


def attack(house: House, victim: House, cases: int, seed: int) -> None:
    draw, model = random.Random(seed), house.tinker.state.models[f"{house.session}:train:0"]
    for _ in range(cases):
        kind = draw.random()
        if kind < 0.1:
            name, answer = "another's", of_another(house, victim, draw)
            assert answer.status_code == 404, answer.text
        elif kind < 0.2:
            name = "shapes"
            answer = house.post("forward_backward", content=misshapen(house, model.next_seq, draw))
            found = house.result(answer.json())
            assert isinstance(found, dict) and found["category"] == "user", found
        elif kind < 0.6:
            name = draw.choice(PROTOS)
            body = mutated(house.message(name, seq=model.next_seq), draw)
            answer = house.post("forward_backward", content=body)
        else:
            name = draw.choice(JSONS)
            given = {**RECORDED[name]["json"]}
            given |= (
                {"seq_id": model.next_seq + (name == "sample") * draw.randrange(10**6)} if "seq_id" in given else {}
            )
            text = json.dumps(given).replace("SESSION", house.session)
            answer = house.post(RECORDED[name]["path"], with_odd(json.loads(text), draw))
        assert answer.status_code in (200, 400, 404, 409, 410, 413, 415, 429), (name, answer.status_code, answer.text)
        if answer.status_code == 200 and "request_id" in answer.json():
            house.work()
            job = house.tinker.state.known(tenant_of(house.key), answer.json()["request_id"])
            error = None if job is None or not job.future.done() else job.future.exception()
            assert error is None or type(error).__name__ == "JobError", (name, error)


def alive(house: House) -> float:
    """The loss of a good request after an update, in a session of its own."""
    other = house.of("tml-bob")
    other.make()
    first = other.result(other.post("forward_backward", content=other.message("cross_entropy")).json())
    other.result(other.recorded("optim_step"))
    output = other.result(other.post("forward_backward", content=other.message("cross_entropy", seq=3)).json())
    assert metrics_of(output) != metrics_of(first), "both matrices of the adapter are seen"
    other.get(f"sessions/{other.session}/finish", "POST")
    other.work()
    return metrics_of(output)["loss:sum"]


@pytest.mark.parametrize("cases", [60, pytest.param(10_000, marks=pytest.mark.release)])
def test_mutated_bodies(cases: int, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, bounds in SMALL_BOUNDS.items():
        for name, most in bounds.items():
            monkeypatch.setattr(module, name, most)
    before, victim = alive(house), house.of("tml-victim")
    victim.make()
    victim.result(victim.post("forward_backward", content=victim.message("cross_entropy", seq=1)).json())
    victim.result(victim.recorded("optim_step", seq_id=2))
    victim.result(victim.recorded("save", seq_id=3, path="one"))
    victim.recorded("base_sampler", sampling_session_seq_id=0)
    attack(house, victim, cases, seed=1)
    assert alive(house) == before
    seen = victim.result(victim.post("forward_backward", content=victim.message("forward", seq=4)).json())
    assert metrics_of(seen) and victim.get("checkpoints").json()["checkpoints"], "all of another tenant's is there"
    if cases > 1000:
        tracemalloc.start()
        attack(house, victim, 1000, seed=2)
        gc.collect()
        first = tracemalloc.get_traced_memory()[0]
        attack(house, victim, 1500, seed=3)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - first
        tracemalloc.stop()
        assert grown < 2**19


def test_tensors_that_claim_to_be_large(house: House) -> None:
    model = f"{house.session}:train:0"

    def claimed(*sides: int) -> bytes:
        tensor = wire.number_field(3, 1) + b"".join(wire.number_field(4, side) for side in sides)
        return wire.bytes_field(2, wire.bytes_field(1, b"")) + tensor

    seq = house.tinker.state.models[model].next_seq
    for number, sides in enumerate(((2**40, 2), (2**33,), (-1, 3), (10**5, 10**5), (3,)), start=seq):
        datum = wire.entry(2, "weights", wire.bytes_field(2, claimed(*sides)))
        body = wire.bytes_field(1, model) + wire.number_field(2, number) + wire.bytes_field(3, datum)
        found = house.result(house.post("forward_backward", content=body).json())
        assert " shape" in found["error"] and found["category"] == "user"
    body = request_of(model, 1, [([3], {"target_tokens": np.zeros((1, 3))})], "cross_entropy")
    assert house.post("forward_backward", content=body, **{"content-encoding": "zstd"}).status_code == 415
    assert house.post("telemetry", content=b"[" * 10**5).status_code == 400


def test_messages_of_random_bytes() -> None:
    draw = random.Random(3)
    for _ in range(3000):
        raw = draw.randbytes(draw.randrange(40))
        with contextlib.suppress(wire.WireError):
            wire.read_forward_backward(raw)


def test_what_is_written_is_read_again() -> None:
    draw = np.random.default_rng(0)
    for shape in ((0,), (5,), (3, 4), (2, 3, 4)):
        for values in (draw.normal(size=shape).astype(np.float32), draw.integers(-(2**60), 2**60, shape)):
            found = wire.read_tensor(wire.tensor(values))
            assert found.shape == shape and found.dtype == values.dtype and (found == values).all()


def test_keys_of_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nalice tml-0123456789abcdef\nbob tml-fedcba9876543210\n")
    from truestep.commands.tinker.errors import ApiError
    from truestep.commands.tinker.tenants import Tenants, TenantsError

    tenants = Tenants(keys)
    assert (tenants.of("tml-0123456789abcdef"), tenants.of("tml-fedcba9876543210")) == ("alice", "bob")
    for wrong in (None, "", "tml-0123456789abcde", "tml-other"):
        with pytest.raises(ApiError):
            tenants.of(wrong)
    for text in ("", "alice short", "a b c", "alice tml-0123456789abcdef\nalice tml-0000000000000000"):
        keys.write_text(text)
        with pytest.raises(TenantsError):
            Tenants(keys)
