"""Futures and turns: what is kept, what is forgotten, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from truestep.commands.tinker import accounts
from truestep.commands.tinker import state as states
from truestep.commands.tinker.checkpoints import Adapted
from truestep.commands.tinker.errors import ApiError
from truestep.commands.tinker.objects import ClientSession, Job, Model, Result, Sampler
from truestep.commands.tinker.state import State
from truestep.commands.tinker.usage import Quota


def submitted(state: State, tenant: str, name: str, together: str | None = None) -> Job:
    state.sessions.setdefault("s", ClientSession("s", "a", 0.0, 0.0, None, None))
    return state.submit(Job(name, tenant, "s", None, together))


def test_tenants_take_turns_and_alike_jobs_go_together() -> None:
    state = State()
    for name in ("a1", "a2", "a3"):
        submitted(state, "a", name)
    submitted(state, "b", "b1", "sampler")
    submitted(state, "c", "c1", "sampler")
    submitted(state, "b", "b2")
    taken = [[job.id for job in state.take()] for _ in range(6)]
    assert taken == [["a1"], ["b1", "c1"], ["a2"], ["b2"], ["a3"], []]


def test_results_that_were_retrieved_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MOST_KEPT", 3)
    state = State()
    for number in range(6):
        job = submitted(state, "a", f"j{number}")
        job.end(Result(message=b"x"))
        if number < 5:
            state.retrieved(job)
    for number in range(2):
        with pytest.raises(ApiError) as error:
            state.future("a", f"j{number}")
        assert error.value.status == 410
    assert state.future("a", "j5").future.result().message == b"x"
    with pytest.raises(ApiError) as error:
        state.future("b", "j5")
    assert error.value.status == 404


def test_names_of_results_that_nobody_retrieved_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MOST_KEPT", 3)
    monkeypatch.setattr(accounts, "_MOST_REMEMBERED", 5)
    state = State()
    for number in range(60):
        submitted(state, "a", f"j{number}").end(Result(message=b"x"))
    assert (len(state._own["a"].jobs), len(state._own["a"].forgotten)) == (11, 5)


def test_a_tenant_may_have_so_many_requests_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_WAITING", 2)
    state = State()
    first = submitted(state, "a", "j0")
    submitted(state, "a", "j1")
    with pytest.raises(ApiError) as error:
        submitted(state, "a", "j2")
    assert error.value.status == 429
    assert submitted(state, "a", "j1").id == "j1", "one that is known is no new one"
    submitted(state, "b", "j2")
    first.end(Result())
    submitted(state, "a", "j2")


def of_model(state: State, quota: Quota) -> Callable[[int, int], Job]:
    """Submits requests of one model, of so many bytes."""
    state.quota = lambda tenant: quota
    session = state.begin("a", None, None)
    model = state.add_model(Model("m", "a", session.id, "base", Adapted(1, 0, [])))
    return lambda seq, size: state.submit(Job(f"m:{seq}", "a", session.id, None, seq=seq, size=size), model)


def test_the_request_that_others_wait_for_is_accepted() -> None:
    """The client sends the first part of a pass last, when all the others are accepted."""
    state = State()
    send = of_model(state, Quota(requests=1))
    for seq in (3, 4, 2, 1):
        send(seq, 0)
    with pytest.raises(ApiError) as error:
        send(5, 0)
    assert error.value.status == 429
    for _ in range(4):
        (job,) = state.take()
        job.end(Result())
    assert send(5, 0).id == "m:5"


def test_bytes_that_wait_for_an_earlier_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MOST_WAITING_BYTES", 100)
    state = State()
    send = of_model(state, Quota())
    send(2, 60)
    with pytest.raises(ApiError) as error:
        send(3, 60)
    assert error.value.status == 413, "it would be refused for ever"
    send(1, 60)
    with pytest.raises(ApiError) as error:
        send(3, 60)
    assert error.value.status == 429


def test_samplers_and_clients_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_SAMPLERS", 2)
    monkeypatch.setattr(states, "_MOST_CLONES", 3)
    state = State()
    session = state.begin("a", None, None)
    samplers = [Sampler(f"s{number}", "a", session.id, "base", f"path {number}") for number in range(3)]
    state.add_sampler(samplers[0])
    state.add_sampler(samplers[1])
    with pytest.raises(ApiError) as error:
        state.add_sampler(samplers[2])
    assert error.value.status == 429
    state.remove_samplers("b", "path 0")
    assert "s0" in state.samplers, "another tenant's checkpoint"
    state.remove_samplers("a", "path 0")
    state.add_sampler(samplers[2])
    assert session.samplers == ["s1", "s2"] == list(state.samplers)
    assert [state.add_clone(session) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(ApiError) as error:
        state.add_clone(session)
    assert error.value.status == 429


def test_a_silent_session_ends() -> None:
    clock = [0.0]
    state = State(lambda: clock[0])
    silent, heard = (state.begin("a", None, None) for _ in range(2))
    state.models["m"] = Model("m", "a", silent.id, "base", Adapted(1, 0, []))
    silent.models.append("m")
    clock[0] = 500.0
    state.session("a", heard.id)
    clock[0] = 700.0
    state.end_silent()
    assert (silent.finished, heard.finished, state.models) == (True, False, {})
    with pytest.raises(ApiError) as error:
        state.session("a", silent.id)
    assert error.value.status == 410
