"""Futures and turns: what is kept, what is forgotten, and whose turn it is."""

from __future__ import annotations

import pytest

from truestep.commands.tinker import state as states
from truestep.commands.tinker.checkpoints import Adapted
from truestep.commands.tinker.errors import ApiError
from truestep.commands.tinker.state import ClientSession, Job, Model, Result, State


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
    monkeypatch.setattr(states, "_MOST_KEPT", 3)
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


def test_a_tenant_may_have_so_many_requests_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_WAITING", 2)
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
