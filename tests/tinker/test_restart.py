"""A server that is started again goes on where it was: what it accepted is computed, and what it told is told again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tinker.house import House, arrays_of, config_of, metrics_of, request_of, served_in, tenant_of
from truestep.commands.session.session import Session
from truestep.commands.tinker import jobs as jobs_module
from truestep.commands.tinker import journal as journals
from truestep.commands.tinker import state as states
from truestep.commands.tinker.journal import Journal, JournalError
from truestep.commands.tinker.usage import Quota
from truestep.step.learner import Learner

Send = Callable[[House, int], Any]


def passed(house: House, seq: int, target: int = 5) -> Any:
    data = [([3, 4, target], {"target_tokens": [4, 5, 6], "weights": [1.0, 0.5, seq / 8]})]
    return house.post(
        "forward_backward", content=request_of(f"{house.session}:train:0", seq, data, "cross_entropy")
    ).json()


def recorded(name: str, **given: Any) -> Send:
    return lambda house, seq: house.recorded(name, seq_id=seq, **given)


def loads(house: House, seq: int) -> Any:
    model = f"{house.session}:train:0"
    return house.recorded("load", seq_id=seq, model_id=model, path=f"tinker://{model}/weights/one")


def forwards(house: House, seq: int) -> Any:
    return house.post("forward_backward", content=house.message("forward", seq=seq)).json()


UPDATE = recorded("optim_step")
# Two steps, one that fails, a save and a load, an update without a gradient, which fails, a gradient in two parts,
# samples, and what all of it has led to.
PROGRAM: list[Send] = [
    passed, UPDATE, passed, lambda house, seq: passed(house, seq, target=9999), UPDATE, passed, passed, UPDATE,
    recorded("save", path="one"), passed, UPDATE, loads, UPDATE, passed, recorded("sampler"), UPDATE, forwards,
]  # fmt: skip


def shown(answer: Any) -> Any:
    if not isinstance(answer, bytes):
        return json.dumps(answer)
    return {name: one.tolist() for each in arrays_of(answer) for name, one in each.items()}, metrics_of(answer)


def drawn(house: House) -> Any:
    return house.result(house.recorded("sample", seq_id=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("again")


@pytest.fixture
def house(folder: Path, tmp_path: Path) -> House:
    house = served_in(folder, tmp_path / "checkpoints")
    house.make()
    return house


def undisturbed(folder: Path, place: Path) -> tuple[list[Any], Any]:
    house = served_in(folder, place)
    house.make()
    found = [shown(house.result(send(house, seq))) for seq, send in enumerate(PROGRAM, start=1)]
    return [json.dumps(one).replace(house.session, "SESSION") for one in found], drawn(house)


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["a state after each step", "no state"])
@pytest.mark.parametrize(
    ("computed", "every"),
    [
        pytest.param(True, 8, id="computed"),
        pytest.param(True, 1, id="computed, each time", marks=pytest.mark.long),
        pytest.param(False, 1, id="accepted, each time", marks=pytest.mark.long),
    ],
)
def test_a_server_that_starts_again_goes_on_bit_for_bit(
    computed: bool,
    every: int,
    seconds: float,
    folder: Path,
    house: House,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts again before a request of the program is told, or before it is computed."""
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", seconds)
    expected, samples = undisturbed(folder, tmp_path / "whole")
    promises = []
    for seq, send in enumerate(PROGRAM, start=1):
        promises.append(send(house, seq))
        if computed:
            house.work()
        if seq % every == 0:
            house = house.started_again(folder)
        assert send(house, seq) == promises[-1], "a request that is sent again is known"
    found = [json.dumps(shown(house.result(promise))).replace(house.session, "SESSION") for promise in promises]
    assert found == expected
    assert drawn(house) == samples
    (state,) = house.tinker.directory.glob("live/*/0/*/state.json")
    assert (int(state.parent.name) > 3) == (seconds == 0.0)
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    assert [one.name for one in (house.tinker.directory / "live").iterdir()] == ["lock"]


def test_a_record_that_was_cut_off_was_never_accepted(folder: Path, house: House) -> None:
    house.result(passed(house, 1))
    house.result(UPDATE(house, 2))
    (file,) = house.tinker.directory.glob("live/*/0/0/requests")
    whole = len(file.read_bytes())
    promise = passed(house, 3)
    raw = file.read_bytes()
    expected = None
    for size in (whole + 1, len(raw) - 1, len(raw)):
        file.write_bytes(raw[:size])
        house = house.started_again(folder)
        assert len(file.read_bytes()) == (whole if size < len(raw) else len(raw))
        assert passed(house, 3) == promise
        found = shown(house.result(promise))
        assert found == (expected or found)
        expected = found
    events = next(house.tinker.directory.glob("live/*/session.jsonl"))
    with events.open("ab") as opened:
        opened.write(b'{"kind": "sam')
    house = house.started_again(folder)
    assert events.read_bytes().endswith(b"}\n") and shown(house.result(promise)) == expected


def test_samples_are_asked_for_again(folder: Path, house: House) -> None:
    house.result(house.recorded("sampler", seq_id=1))
    expected = drawn(house)
    promise = house.recorded("sample", seq_id=1)
    house = house.started_again(folder)
    answer = house.post("retrieve_future", {"request_id": promise["request_id"]})
    assert answer.status_code == 410, "the client then asks anew"
    bob = house.of("tml-bob").post("retrieve_future", {"request_id": promise["request_id"]})
    assert bob.status_code == 404
    assert drawn(house) == expected, "the sampler is there"
    clone = {"sampling_session_id": f"{house.session}:sample:0"}
    assert house.post("join_sampling_session", clone).json()["client_counter"] == 1
    house = house.started_again(folder)
    assert house.post("join_sampling_session", clone).json()["client_counter"] == 2


def test_a_model_of_a_checkpoint_that_was_removed_goes_on(folder: Path, house: House) -> None:
    house.result(passed(house, 1))
    house.result(UPDATE(house, 2))
    path = house.result(house.recorded("save", seq_id=3))["path"]
    house.result(house.recorded("load", path=path, model_seq_id=1, optimizer=True))
    house.get(f"training_runs/{house.session}:train:0/checkpoints/weights/{path.rpartition('/')[2]}", "DELETE")
    house = house.started_again(folder)
    again = house.tinker.state.known(tenant_of(house.key), f"{house.session}:train:1:0")
    assert again is not None and again.reads is None, "it waits for no model whose checkpoint it began with"
    second = house.message("forward", seq=1, model=f"{house.session}:train:1")
    first = house.post("forward_backward", content=house.message("forward", seq=4)).json()
    found = house.result(house.post("forward_backward", content=second).json())
    assert shown(found) == shown(house.result(first))


def test_a_step_that_cannot_be_made_again_is_not_lost_silently(
    folder: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.result(house.recorded("save", seq_id=1, path="one"))
    house.result(passed(house, 2))
    told = house.result(UPDATE(house, 3))

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    house = house.started_again(folder)
    with monkeypatch.context() as fault:
        fault.setattr(Session, "step", fails)
        house.work()
    assert house.result({"request_id": f"{house.session}:train:0:3"}) == told
    assert "could not be computed again" in house.result(passed(house, 4))["error"]
    assert house.result(loads(house, 5))["type"] == "load_weights"
    assert isinstance(house.result(passed(house, 6)), bytes)


def test_disks_that_fail(folder: Path, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be kept is refused, and the client sends it again. What else cannot be, costs nothing."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as fault:
        fault.setattr(Journal, "request", fails)
        body = request_of(f"{house.session}:train:0", 1, [([3], {"target_tokens": [4]})], "cross_entropy")
        answer = house.post("forward_backward", content=body)
        assert answer.status_code == 503 and "No space left" in answer.json()["error"]
        assert house.send("session").status_code == 200
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", 0.0)
    with monkeypatch.context() as fault:
        fault.setattr(Journal, "result", fails)
        fault.setattr(Journal, "keep", fails)
        house.result(passed(house, 1))
        told = house.result(UPDATE(house, 2))
    house = house.started_again(folder)
    assert house.result({"request_id": f"{house.session}:train:0:2"}) == told


def test_a_state_that_is_not_written_whole_leaves_nothing(
    folder: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the requests since the state are written behind it."""
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", 0.0)
    place = house.tinker.directory / "live" / house.session / "0"

    def full(file: str, flags: int) -> int:
        if "/." in file:
            raise OSError(28, "No space left on device")
        return os.open(file, flags, 0o600)

    house.result(passed(house, 1))
    with monkeypatch.context() as fault:
        fault.setattr(journals, "_own", full)
        told = house.result(UPDATE(house, 2))
    assert told["metrics"]["step"] == 1 and [one.name for one in place.iterdir()] == ["0"]
    expected = shown(house.result(forwards(house, 3)))
    house = house.started_again(folder)
    assert shown(house.result(forwards(house, 4))) == expected


def test_a_session_that_finishes_while_its_state_is_written_leaves_nothing(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", 0.0)
    write = Session.write

    def late(self: Session, directory: Path, **given: Any) -> Path:
        assert house.get(f"sessions/{house.session}/finish", "POST").status_code == 200
        session = house.tinker.state.ended.popleft()
        house.tinker._jobs.free(session)
        house.tinker.state.write(session, lambda: None).result(60)
        return write(self, directory, **given)

    house.result(passed(house, 1))
    monkeypatch.setattr(Session, "write", late)
    UPDATE(house, 2)
    house.work()
    assert [one.name for one in (house.tinker.directory / "live").iterdir()] == ["lock"]


def test_directories_that_are_not_for_this_server(folder: Path, house: House) -> None:
    with pytest.raises(JournalError, match="another server uses"):
        Journal(house.tinker.directory / "live")
    events = next(house.tinker.directory.glob("live/*/session.jsonl"))
    begun = json.loads(events.read_text().splitlines()[0])
    assert begun["base"] == str((folder / "model").absolute()) and "tml-alice" not in events.read_text()
    house.result(house.recorded("sampler", seq_id=1))
    expected = drawn(house)
    house.result(passed(house, 2))
    house.result(UPDATE(house, 3))  # the model goes on, so that the sampler needs its checkpoint
    whole = events.read_text()
    events.write_text(whole.replace(begun["base"], str(folder / "other")))
    again = house.started_again(folder)
    assert again.post("session_heartbeat", {"session_id": house.session}).status_code == 404
    assert events.exists(), "the server of the other model goes on with it"
    events.write_text(whole)
    found = drawn(again.started_again(folder))
    assert found == expected, "its samplers without names waited too"


def test_other_weights_and_other_options_continue_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = served_in(tmp_path, tmp_path / "checkpoints")
    house.make()
    house.result(passed(house, 1))
    told = shown(house.result(forwards(house, 2)))

    def goes_on() -> bool:
        nonlocal house
        house = house.started_again(tmp_path)
        return house.post("session_heartbeat", {"session_id": house.session}).status_code == 200

    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    name = next(iter(weights))
    save_file({**weights, name: weights[name].flip(0)}, file, {"format": "pt"})
    assert not goes_on()
    save_file(weights, file, {"format": "pt"})
    whole = config_of(tmp_path)
    for option, value in (
        ("data.tokens_per_microbatch", 128),
        ("deterministic", True),
        ("model.head.logits_chunk_size", 7),
    ):
        with monkeypatch.context() as other:
            other.setattr("tinker.house.config_of", lambda _, changed={option: value}: whole.changed(changed))
            assert not goes_on(), option
    assert goes_on() and shown(house.result({"request_id": f"{house.session}:train:0:2"})) == told


def test_the_journal_does_not_grow_without_end(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests that change nothing, with steps that fail, and with results that nobody asks for."""
    monkeypatch.setattr(jobs_module, "_STATE_BYTES", 4000)
    monkeypatch.setattr(Journal, "size", lambda self, model: 0)
    place, seq = house.tinker.directory / "live" / house.session / "0", 0

    def state() -> Path:
        (one,) = (each for each in place.iterdir() if (each / "state.json").exists())
        return one

    for send in (forwards, UPDATE, lambda house, seq: passed(house, seq, target=9999)):
        begun = int(state().name)
        for _ in range(60):
            seq += 1
            house.result(send(house, seq))
        seq += 1
        house.result(UPDATE(house, seq))
        assert int(state().name) > begun and (state() / "requests").stat().st_size < 30_000
    before = state()
    house.result(passed(house, seq + 1))
    for number in range(2, 40):
        house.result(forwards(house, seq + number))
    assert state() == before, "a gradient is open"
    house.result(UPDATE(house, seq + 40))
    begun = int(state().name)
    assert begun == int(before.name) + 1
    for number in range(41, 141):  # whose results are not asked for, and so are kept
        forwards(house, seq + number)
        house.work()
    assert (state() / "requests").stat().st_size > 2 * jobs_module._STATE_BYTES
    assert int(state().name) - begun < 20


def states_of(house: House, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the requests after which a state is written, or tried to be."""
    written: list[int] = []
    whole = Journal.keep

    def keep(self: Journal, model: str, next_seq: int, *given: Any) -> Any:
        written.append(next_seq - 1)
        return whole(self, model, next_seq, *given)

    monkeypatch.setattr(Journal, "keep", keep)
    return written


def test_states_are_written_after_as_many_bytes_as_they_have(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a disk gets at most twice the bytes of requests and results; also where a state could not be written."""
    monkeypatch.setattr(jobs_module, "_STATE_BYTES", 1000)
    written, model = states_of(house, monkeypatch), f"{house.session}:train:0"
    journal = house.tinker.state.journal
    assert journal is not None
    grown = []

    def go_on(first: int, last: int) -> None:
        for seq in range(first, last):
            house.result(forwards(house, seq))
            grown.append(journal.grown(model))

    go_on(1, 20)
    first = written[0]
    assert journal.size(model) > 20_000 and written == [first], "the state has more bytes than the requests after it"
    file = next(house.tinker.directory.glob("live/*/0/*/requests"))
    assert journal.grown(model) <= file.stat().st_size
    planted = 3000
    monkeypatch.setattr(Journal, "size", lambda self, model: planted)
    go_on(20, 50)
    apart = [b - a for a, b in pairwise(written[1:])]
    assert len(apart) > 2 and min(apart) > 1, "not after each request"
    assert max(grown[20:]) < 2 * planted, "and the journal has a bound"

    def full(self: Session, *_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    before = len(written)
    with monkeypatch.context() as fault:
        fault.setattr(Session, "write", full)
        go_on(50, 80)
    tried = [b - a for a, b in pairwise(written[before:])]
    assert len(tried) > 2 and min(tried) > 1, "not tried after each request"


def test_passes_of_a_model_with_a_large_state_are_not_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the state has more bytes than requests may have without an update, and no gradient is open."""
    monkeypatch.setattr(jobs_module, "_STATE_BYTES", 1000)
    written, journal = states_of(house, monkeypatch), house.tinker.state.journal
    assert journal is not None
    while not written:
        house.result(forwards(house, house.seq + 1))
        house.seq += 1
    most = 10_000
    monkeypatch.setattr(states, "MOST_GROWN", most)
    assert journal.size(f"{house.session}:train:0") > 2 * most
    for seq in range(house.seq + 1, house.seq + 60):
        assert isinstance(house.result(forwards(house, seq)), bytes)
    apart = [b - a for a, b in pairwise(written)]
    assert len(apart) > 2 and min(apart) > 1, "not after each request"


def test_seconds_that_change_no_weights_write_no_state(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", 0.0001)
    written = states_of(house, monkeypatch)
    for seq in (1, 2, 3):
        house.result(forwards(house, seq))
    assert written == []
    house.result(passed(house, 4))
    house.result(UPDATE(house, 5))
    assert written == [5]
    house.result(forwards(house, 6))
    assert written == [5]


def test_requests_without_an_update_have_a_bound(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a gradient is open no state is written, so the journal would grow without end."""
    house.result(passed(house, 1))
    journal = house.tinker.state.journal
    assert journal is not None
    monkeypatch.setattr(states, "MOST_GROWN", journal.grown(f"{house.session}:train:0"))
    assert "since its last update" in house.result(passed(house, 2))["error"]
    assert "a forward_backward of this step failed" in house.result(UPDATE(house, 3))["error"]
    monkeypatch.setattr(jobs_module, "_STATE_BYTES", 1)
    monkeypatch.setattr(Journal, "size", lambda self, model: 0)
    house.result(UPDATE(house, 4))  # without a gradient, which fails, and a state is written
    assert isinstance(house.result(passed(house, 5)), bytes)
    assert house.result(UPDATE(house, 6))["metrics"]["step"] == 1


def test_after_an_update_that_failed_a_new_server_has_the_weights_before_it(
    folder: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.result(passed(house, 1))
    house.result(UPDATE(house, 2))
    weights = shown(house.result(forwards(house, 3)))
    whole = Learner.update

    def half(self: Learner, *given: Any, **options: Any) -> None:
        whole(self, *given, **options)
        raise RuntimeError("a planted fault")

    house.result(passed(house, 4))
    with monkeypatch.context() as fault:
        fault.setattr(Learner, "update", half)
        told = [house.result(UPDATE(house, 5)), house.result(passed(house, 6))]
    assert "load a checkpoint" in told[1]["error"]
    house = house.started_again(folder)
    assert [house.result({"request_id": f"{house.session}:train:0:{seq}"}) for seq in (5, 6)] == told
    assert shown(house.result(forwards(house, 7))) == weights


def test_a_save_that_was_complete_is_told_whatever_the_quota(
    folder: Path, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as fault:
        fault.setattr(Journal, "result", fails)
        told = house.result(house.recorded("save", seq_id=1))
    house = house.started_again(folder)
    house.tinker.state.quota = lambda tenant: Quota(bytes=1)
    assert "path" in told and house.result({"request_id": f"{house.session}:train:0:1"}) == told


def test_nobody_else_reads_the_journal(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "_STATE_SECONDS", 0.0)
    for seq, send in enumerate((passed, UPDATE, passed), start=1):
        house.result(send(house, seq))
    live = house.tinker.directory / "live"
    assert live.stat().st_mode & 0o777 == 0o700
    files = [*live.rglob("requests"), *live.rglob("session.jsonl")]
    assert len(files) == 2 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def test_checkpoints_of_a_tenant_s_older_name_are_there(folder: Path, house: House) -> None:
    """Without a file of keys, tenants were once named by their keys, and not by digests of these."""
    house.result(passed(house, 1))
    house.result(UPDATE(house, 2))
    path = house.result(house.recorded("save", seq_id=3))["path"]
    expected = shown(house.result(forwards(house, 4)))
    house.get(f"sessions/{house.session}/finish", "POST")
    house.work()
    own = house.tinker.directory / sha256(tenant_of(house.key).encode()).hexdigest()[:32]
    own.rename(house.tinker.directory / sha256(f"key {house.key}".encode()).hexdigest()[:32])
    house = house.started_again(folder)
    assert house.of("tml-bob").get("checkpoints").json()["checkpoints"] == []
    (found,) = house.get("checkpoints").json()["checkpoints"]
    assert found["tinker_path"] == path
    house.begin()
    model = house.result(house.recorded("load", path=path, model_seq_id=0))["model_id"]
    assert (
        shown(house.result(house.post("forward_backward", content=house.message("forward", 1, model)).json()))
        == expected
    )


def test_a_session_of_an_older_journal_is_named(folder: Path, house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.result(passed(house, 1))
    events = next(house.tinker.directory.glob("live/*/session.jsonl"))
    first, *rest = events.read_text().splitlines()
    begun = json.loads(first)
    del begun["computes"]
    events.write_text("\n".join([json.dumps(begun), *rest, ""]))
    again = house.started_again(folder)
    assert again.post("session_heartbeat", {"session_id": house.session}).status_code == 404
    assert "is of an older truestep" in caplog.text and str(events.parent) in caplog.text and events.exists()
    again.make()


def test_a_model_that_was_half_begun_is_begun_anew(folder: Path, house: House) -> None:
    """The server was killed while the model's directory was made, or its disk was full."""
    expected = shown(house.result(passed(house, 1)))
    model = house.tinker.directory / "live" / house.session / "0"
    for left in ("nothing", "a directory", "a part of a state"):
        shutil.rmtree(model)
        (model / "0").mkdir(parents=True)
        if left == "nothing":
            (model / "0").rmdir()
        elif left == "a part of a state":
            (model / "0" / ".state.json.1.partial").write_text("{")
        house = house.started_again(folder)
        assert shown(house.result(passed(house, 1))) == expected, left


@pytest.mark.parametrize("what", ["events", "model", "state"])
def test_a_session_that_cannot_be_read_stops_no_other(
    what: str, folder: Path, house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of it is removed, and it goes on where its files are mended."""
    bob = house.of("tml-bob")
    bob.make()
    told = shown(bob.result(passed(bob, 1)))
    house.result(house.recorded("sampler", seq_id=1))
    expected = drawn(house)
    place = house.tinker.directory / "live" / house.session
    file = {"events": place / "session.jsonl", "model": place / "session.jsonl", "state": place / "0/0/state.json"}[
        what
    ]
    whole = file.read_text()
    file.write_text(whole.replace('"id"', '"name"') if what == "model" else whole[1:])
    again = house.started_again(folder)
    assert str(place) in caplog.text
    bob = replace(again, key=bob.key, session=bob.session)
    assert shown(bob.result({"request_id": f"{bob.session}:train:0:1"})) == told
    assert again.post("session_heartbeat", {"session_id": house.session}).status_code == 404
    file.write_text(whole)
    assert drawn(again.started_again(folder)) == expected
