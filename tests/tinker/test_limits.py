"""What a tenant may take, of memory, of the disk and of the server's time."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tinker.house import House, request_of, tenant_of
from tinker.test_state import submitted
from truestep.commands.tinker import accounts, requests, serving, wire
from truestep.commands.tinker import state as states
from truestep.commands.tinker.checkpoints import Adapted, Checkpoints
from truestep.commands.tinker.errors import ApiError, JobError
from truestep.commands.tinker.objects import Job, Model, Result
from truestep.commands.tinker.state import State


def sparse(model: str, seq: int, columns: int, data: int = 1) -> bytes:
    """A few bytes that ask for so many targets at one position."""
    rows = wire.bytes_field(2, np.zeros(2, "<i8").tobytes())
    shape = wire.number_field(4, 1) + wire.number_field(4, columns)
    tensor = wire.bytes_field(2, rows) + wire.number_field(3, 2) + shape
    chunk = wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(1, np.array([3], "<i4").tobytes())))
    datum = chunk + wire.entry(2, "target_tokens", wire.bytes_field(2, tensor))
    head = wire.bytes_field(1, model) + wire.number_field(2, seq) + wire.bytes_field(4, "cross_entropy")
    return head + wire.bytes_field(3, datum) * data


def test_few_bytes_make_no_large_request(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    model = f"{house.session}:train:0"
    monkeypatch.setattr(requests, "_MOST_DOCUMENTS", 3000)
    tracemalloc.start()
    for seq, (body, message) in enumerate(
        [
            (sparse(model, 1, 100_000), "100000 targets at a position are more than 1024"),
            (sparse(model, 2, 1000, data=4), "more than 3000 targets"),
            (sparse(model, 3, 2**22, data=3), "numbers"),
            (request_of(model, 4, [([3], {"target_tokens": [4]})] * 1025, "cross_entropy"), "1025 data are more"),
        ],
        start=1,
    ):
        found = house.result(house.post("forward_backward", content=body).json())
        assert message in found["error"] and found["category"] == "user", seq
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**27


def test_a_job_that_ended_keeps_no_request(house: House) -> None:
    promise = house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json()
    job = house.tinker.state.future(tenant_of("tml-alice"), promise["request_id"])
    assert job.work is not None and job.size > 100
    house.work()
    assert job.work is None and job.future.done()


def test_bytes_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MOST_WAITING_BYTES", 100)
    state = State()
    submitted(state, "a", "j")

    def send(name: str, tenant: str = "a") -> Job:
        return state.submit(Job(name, tenant, "s", None, size=60))

    first = send("j0")
    with pytest.raises(ApiError) as error:
        send("j1")
    assert error.value.status == 429
    send("j1", "b")
    first.end(Result())
    send("j1")


def test_models_of_a_tenant(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "_MOST_MODELS", 2)
    assert house.send("model", model_seq_id=1).status_code == 200
    assert house.send("model", model_seq_id=1).status_code == 200, "one that is there already"
    refused = house.send("model", model_seq_id=2)
    assert refused.status_code == 400 and "2 models of yours" in refused.text
    other = house.of("tml-bob")
    other.make()
    other.get(f"sessions/{other.session}/finish", "POST")


def test_a_model_that_is_asked_for_again_is_not_made_anew(house: House) -> None:
    house.result(house.post("forward_backward", content=house.message("cross_entropy", seq=1)).json())
    house.result(house.recorded("optim_step", seq_id=2))
    forward = [house.result(house.post("forward_backward", content=house.message("forward", seq=3)).json())]
    own = house.tinker.state._of_tenant(tenant_of("tml-alice"))
    del own.jobs[f"{house.session}:train:0:0"]  # as if its result were kept no longer
    assert house.result(house.recorded("model"))["model_id"] == f"{house.session}:train:0"
    forward.append(house.result(house.post("forward_backward", content=house.message("forward", seq=4)).json()))
    assert forward[0] == forward[1]


def test_a_session_frees_what_is_there(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its snapshots expires when it is removed, the disk fails for another session, and the server goes on."""
    house.result(house.recorded("sampler", seq_id=1))
    store = house.tinker._jobs._checkpoints
    listed = store.hidden

    def gone(tenant: str, run: str) -> list[object]:
        found = listed(tenant, run)
        shutil.rmtree(store._of(tenant))
        return list(found)

    monkeypatch.setattr(store, "hidden", gone)
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    house.make()

    def failing(tenant: str, run: str) -> list[object]:
        raise OSError("a planted fault")

    monkeypatch.setattr(store, "hidden", failing)
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    monkeypatch.undo()
    house.make()


def test_nothing_is_counted_for_a_session_that_has_ended(house: House) -> None:
    house.result(house.recorded("sampler", seq_id=1))
    journal = house.tinker.state.journal
    assert journal is not None and journal.grown(f"{house.session}:train:0") > 0
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    assert not [model for counted in (journal._grown, journal._sizes) for model in counted if house.session in model]


def test_snapshots_without_names_are_the_last_ones(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.commands.tinker.jobs._MOST_HIDDEN", 3)
    run = house.tinker._jobs._checkpoints.place(
        tenant_of("tml-alice"), f"{house.session}:train:0", "sampler_weights", "x"
    )
    for number in range(4):
        house.result(house.recorded("sampler", seq_id=1 + number, sampling_session_seq_id=number))
        last = range(max(1, number - 1), number + 2)
        assert sorted(one.name for one in run.parent.iterdir()) == [f"unnamed-{seq:06d}" for seq in last]
    assert "error" not in str(house.result(house.recorded("sample", sampling_session_id=f"{house.session}:sample:3")))


def test_a_server_that_was_killed_leaves_nothing_hidden(house: House) -> None:
    house.result(house.recorded("save", seq_id=1))
    house.result(house.recorded("save", seq_id=2, path="two"))
    house.result(house.recorded("sampler", seq_id=3))
    store = house.tinker._jobs._checkpoints
    place = store.place(tenant_of("tml-alice"), f"{house.session}:train:0", "weights", "one")
    (place.parent / ".half").mkdir()
    (place.parent / ".half" / "file").write_text("x")
    (place.parent / "two").rename(place.parent / ".written")  # and not moved to its place yet
    Checkpoints(store._directory).recover()
    files = sorted(str(one.relative_to(place.parent.parent)) for one in place.parent.parent.glob("*/*"))
    assert files == ["weights/one", "weights/two"]


def test_expired_checkpoints_go_and_silent_sessions_end_by_the_clock(house: House) -> None:
    """Sessions also while there are jobs to compute."""
    house.result(house.recorded("save", seq_id=1, ttl_seconds=3600))
    tinker, state, store = house.tinker, house.tinker.state, house.tinker._jobs._checkpoints
    place = store.place(tenant_of("tml-alice"), f"{house.session}:train:0", "weights", "one")
    other = house.of("tml-bob")
    other.make()
    clock, seen, now = tinker.now, state._now, store.now
    try:
        tinker.now = lambda: clock() + serving._SWEEP_SECONDS
        store.now = lambda: now() + 4000
        assert place.exists() and not tinker.turn()
        house.settle()
        assert not place.exists()
        state._now = lambda: seen() + 700
        other.recorded("heartbeat")
        for seq in (1, 2):
            other.post("forward_backward", content=other.message("cross_entropy", seq=seq))
        tinker.now = lambda: clock() + serving._SWEEP_SECONDS + serving._LOOK_SECONDS
        assert tinker.turn() and state.sessions[house.session].finished, "while another waits"
    finally:
        tinker.now, state._now, store.now = clock, seen, now
        other.work()
        other.get(f"sessions/{other.session}/finish", "POST")


def test_a_session_that_finishes_meanwhile_takes_no_request() -> None:
    state = State()
    session = state.begin("a", None, None)
    model = state.add_model(Model("m", "a", session.id, "base", Adapted(1, 0, [])))
    state.finish(session)  # after a request has looked for its model
    for given in (model, None):
        with pytest.raises(ApiError) as error:
            state.submit(Job("m:1", "a", session.id, None, seq=1), given)
        assert error.value.status == 410


def test_jobs_that_two_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that computes and that of a session that finishes both see a job that has not ended: one is first."""
    job = Job("j", "a", "s", None)
    monkeypatch.setattr(job.future, "done", lambda: False)
    job.end(Result(message=b"x"))
    job.fail(JobError("the session has finished"))
    job.end(Result())
    assert job.future.result().message == b"x"


def test_runs_are_listed_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq, name in enumerate(("one", "two", "three"), start=1):
        house.result(house.recorded("save", seq_id=seq, path=name))
    store, read = house.tinker._jobs._checkpoints, []
    whole = store.find_here

    def find(place: Path) -> object:
        read.append(place.name)
        return whole(place)

    monkeypatch.setattr(store, "find_here", find)
    (run,) = house.get("training_runs").json()["training_runs"]
    assert run["last_checkpoint"]["tinker_path"].endswith(("one", "two", "three"))
    assert sorted(read) == ["one", "three", "two"]
