"""Requests that fail among those of a step: the step is not made without them, and what comes behind them goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tinker.house import House, metrics_of, request_of
from truestep.commands.session.session import Session
from truestep.commands.tinker import bodies, orders, wire
from truestep.step.learner import Learner

DATUM: tuple[list[int], dict[str, Any]] = ([3, 4, 5], {"target_tokens": [4, 5, 6]})


def sent(house: House, body: bytes) -> Any:
    answer = house.post("forward_backward", content=body)
    assert answer.status_code == 200, answer.text
    return house.result(answer.json())


def passed(house: House, seq: int, data: Sequence[Any] = (DATUM,)) -> Any:
    return sent(house, request_of(f"{house.session}:train:0", seq, data, "cross_entropy"))


def stepped(house: House, seq: int, rate: float = 0.1) -> Any:
    return house.result(house.recorded("optim_step", seq_id=seq, adam_params={"learning_rate": rate}))


def loss(house: House, seq: int) -> float:
    return metrics_of(sent(house, house.message("forward", seq=seq)))["loss:sum"]


def head(house: House, seq: int) -> bytes:
    return wire.bytes_field(1, f"{house.session}:train:0") + wire.number_field(2, seq)


def images(house: House, seq: int) -> Any:
    datum = wire.bytes_field(3, wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(2, b"png"))))
    return sent(house, head(house, seq) + datum)


def numbers_of_bytes(house: House, seq: int) -> Any:
    return sent(house, head(house, seq) + wire.entry(5, "beta", wire.bytes_field(2, b"zz")))


def typed_numbers_of_bytes(house: House, seq: int) -> Any:
    return sent(house, head(house, seq) + wire.entry(7, "beta", wire.bytes_field(2, wire.bytes_field(1, b"zz"))))


def cut(house: House, seq: int) -> Any:
    return sent(house, head(house, seq) + b"\x1a\x7fzz")


def claimed(house: House, seq: int) -> Any:
    tensor = wire.number_field(3, 1) + wire.number_field(4, 2**40)
    datum = wire.entry(2, "weights", wire.bytes_field(2, tensor))
    return sent(house, head(house, seq) + wire.bytes_field(3, datum))


def large_rate(house: House, seq: int) -> Any:
    return house.result(house.recorded("optim_step", seq_id=seq, adam_params={"learning_rate": 10**400}))


def recorded(name: str, **changed: Any) -> Callable[[House, int], Any]:
    return lambda house, seq: house.result(house.recorded(name, seq_id=seq, **changed))


BAD: dict[str, Callable[[House, int], Any]] = {
    "images": images,
    "numbers of bytes": numbers_of_bytes,
    "typed numbers of bytes": typed_numbers_of_bytes,
    "cut": cut,
    "claimed": claimed,
    "large rate": large_rate,
    "external": recorded("external"),
    "name": recorded("save", path="../x"),
    "time to live": recorded("sampler", ttl_seconds=1),
    "another account": recorded("load", model_id="SESSION:train:0", weights_access_token="x"),
    "no checkpoint": recorded("load", model_id="SESSION:train:0", path="tinker://x/weights/y"),
}


def test_a_request_that_cannot_be_read_keeps_its_place(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq, (name, send) in enumerate(BAD.items(), start=1):
        found = send(house, seq)
        assert found.get("category") == "user", (name, found)
    seq = len(BAD) + 1
    monkeypatch.setattr(bodies, "_LARGEST_BODY", 100)
    assert "more than 100 bytes" in passed(house, seq, [DATUM] * 20)["error"]
    monkeypatch.undo()
    with monkeypatch.context() as fault:
        fault.setattr(orders, "batch_of", failing)
        assert passed(house, seq + 1) == {"category": "server", "error": "an internal error (RuntimeError)"}
    assert loss(house, seq + 2) > 0


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a planted fault")


def test_a_step_with_a_failed_part_is_not_made(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    before = loss(house, 1)
    passed(house, 2)
    stepped(house, 3)
    after = loss(house, 4)
    assert after != before
    for first, bad in ((5, "read"), (9, "computed")):
        passed(house, first)
        if bad == "read":
            assert "vocabulary" in passed(house, first + 1, [([3], {"target_tokens": [99]})])["error"]
        else:
            with monkeypatch.context() as fault:
                fault.setattr(Session, "forward_backward", failing)
                assert passed(house, first + 1)["category"] == "server"
        passed(house, first + 2)
        assert "a forward_backward of this step failed" in stepped(house, first + 3)["error"], bad
    assert loss(house, 13) == after, "nothing was updated"
    assert "error" in sent(house, request_of(f"{house.session}:train:0", 14, [], "ppo") + wire.number_field(6, 1))
    passed(house, 15)
    again = stepped(house, 16, rate=0)["metrics"]
    assert again["step"] == 2, "the next step is whole; a forward pass that failed is no part of it"
    passed(house, 17)
    alone = stepped(house, 18, rate=0)["metrics"]["grad_norm"]
    assert again["grad_norm"] == pytest.approx(alone, rel=1e-5), "and has nothing of the step that was not made"
    passed(house, 19)
    assert "dimuon" in house.result(house.recorded("dimuon", seq_id=20))["error"]
    passed(house, 21)
    found = stepped(house, 22, rate=0)["metrics"]["grad_norm"]
    assert found == pytest.approx(alone, rel=1e-5), "an update that was refused has ended its step too"


def test_a_load_begins_a_step(house: House) -> None:
    path = house.result(house.recorded("save", seq_id=1))["path"]
    load = {"model_id": f"{house.session}:train:0", "path": path}
    bad = house.post("forward_backward", content=house.message("stable_reinforce", seq=2)).json()
    loaded = house.recorded("load", seq_id=3, **load)
    body = request_of(f"{house.session}:train:0", 4, [DATUM], "cross_entropy")
    house.post("forward_backward", content=body)
    assert stepped(house, 5)["metrics"]["step"] == 1
    assert "error" in house.result(bad) and house.result(loaded)["type"] == "load_weights"
    loaded = house.recorded("load", seq_id=6, **load)
    bad = house.post("forward_backward", content=house.message("stable_reinforce", seq=7)).json()
    house.post("forward_backward", content=request_of(f"{house.session}:train:0", 8, [DATUM], "cross_entropy"))
    assert "of this step failed" in stepped(house, 9)["error"], "one that was refused before the load was computed"


def test_a_load_that_fails_leaves_a_snapshot_its_weights(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    passed(house, 1)
    stepped(house, 2)
    path = house.result(house.recorded("save", seq_id=3))["path"]
    house.result(house.recorded("sampler", seq_id=4))
    expected = house.result(house.recorded("sample", seq_id=0))
    with monkeypatch.context() as fault:
        fault.setattr("truestep.commands.session.session.make_optimizer", failing)
        load = house.recorded("load", seq_id=5, model_id=f"{house.session}:train:0", path=path)
        assert house.result(load)["category"] == "server"
    assert house.result(house.recorded("sample", seq_id=1)) == expected


def test_an_update_that_fails_halfway(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot keeps its weights, the model has none until it loads some, and no gradient is left."""
    passed(house, 1)
    stepped(house, 2)
    path = house.result(house.recorded("save", seq_id=3))["path"]
    house.result(house.recorded("sampler", seq_id=4))
    house.result(house.recorded("sampler", seq_id=5, sampling_session_seq_id=1, kind="inflight"))
    inflight = {"sampling_session_id": f"{house.session}:sample:1"}
    expected = house.result(house.recorded("sample", seq_id=0))
    assert house.result(house.recorded("sample", seq_id=0, **inflight)) == expected
    whole = Learner.update

    def half(self: Learner, *given: Any, **options: Any) -> None:
        whole(self, *given, **options)
        raise RuntimeError("a planted fault")

    passed(house, 6)
    with monkeypatch.context() as fault:
        fault.setattr(Learner, "update", half)
        assert stepped(house, 7)["category"] == "server"
    assert house.result(house.recorded("sample", seq_id=1)) == expected, "not the half-updated weights"
    ruined = house.result(house.recorded("sample", seq_id=1, **inflight))
    assert "load a checkpoint" in ruined["error"]
    assert "load a checkpoint" in passed(house, 8)["error"]
    model = f"{house.session}:train:0"
    with monkeypatch.context() as fault:
        fault.setattr("truestep.commands.session.session.make_optimizer", failing)
        assert house.result(house.recorded("load", seq_id=9, model_id=model, path=path))["category"] == "server"
    assert house.result(house.recorded("sample", seq_id=2)) == expected
    assert "load a checkpoint" in house.result(house.recorded("sample", seq_id=2, **inflight))["error"]
    assert house.result(house.recorded("load", seq_id=10, model_id=model, path=path))["type"] == "load_weights"
    assert house.result(house.recorded("sample", seq_id=3, **inflight)) == expected
    passed(house, 11)
    assert stepped(house, 12)["metrics"]["step"] == 2
