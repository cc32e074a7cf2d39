"""States in memory: what keepers hold is what a checkpoint on the disk has, or it is not taken."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from checkpoints import read_states, read_weights
from documents import same_bits
from small_runs import file_config, quiet_trainer, write_rollouts
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.plan.advice import layout_of
from truestep.plan.memory import kept_bytes
from truestep.plan.shape import read_shape
from truestep.ranks import keeper
from truestep.ranks.elastic import Agent, RankLostError
from truestep.ranks.forks import fork_context
from truestep.ranks.group import ALONE
from truestep.ranks.keeper import Key
from truestep.ranks.keeper_client import KeeperError, LocalKeeper, RemoteKeeper
from truestep.run.checkpoint.comparison import Comparison
from truestep.run.checkpoint.memory import Memory, MemoryStore, Recalled
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.staging import SharedStaging
from truestep.run.checkpoint.store import read_progress
from truestep.run.elastic import Elastic, still_stands
from truestep.run.train import _tell_again, make_trainer, train
from truestep.run.trainer import Trainer
from truestep.weights.remote_parts import forget_remote, note_remote

Model = Callable[[str], Path]
PART = "truestep/part-00000.safetensors"
STEPS = 4  # the last step is kept on the disk alone


@pytest.fixture
def config(tiny_model: Model, tmp_path: Path) -> Config:
    write_rollouts(tmp_path / "r.jsonl", 60)
    options: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 99}, "schedule": {"steps": STEPS}}
    return file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", **options)


@pytest.fixture(autouse=True)
def _no_keeper_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for number in (0, 1):
        end(LocalKeeper.of(tmp_path / "run", number))


def end(here: LocalKeeper) -> None:
    try:
        with here.connected() as connection:
            connection.ask("end", generation=99)
    except KeeperError:
        pass


def opened(run: Path, generation: int = 1, limit: int | None = None) -> Memory:
    memory = asked(run, generation, limit)
    memory.begin(float(generation))
    return memory


def asked(run: Path, generation: int = 1, limit: int | None = None) -> Memory:
    return Memory.open(ALONE, run, Agent(os.getpid(), 1, 4), limit, generation)


def keep(trainer: Trainer, memory: Memory) -> list[str]:
    """Have a run keep each state in memory; return what it will say."""
    said: list[str] = []
    memory.say, staging = said.append, SharedStaging()
    trainer.memory = Saves(MemoryStore(memory, staging, lambda: None), trainer.ranks, staging)
    trainer.save_rule = replace(trainer.save_rule, in_memory_every=1)
    return said


def trained(config: Config, **options: Any) -> list[str]:
    assert config.checkpoint.directory is not None
    trainer = quiet_trainer(config)
    said = keep(trainer, opened(Path(config.checkpoint.directory), **options))
    trainer.run()
    return said


def recalled(run: Path, generation: int = 2) -> tuple[Recalled | None, list[str]]:
    return asked(run, generation).recall(lambda key: True, 1, run / "checkpoints")


def keys(run: Path) -> list[Key]:
    return sorted(tuple(one["set"]) for one in asked(run)._answers[0].sets[0] if one["complete"])


def handle_of(run: Path, name: str, step: int, number: int = 0) -> int:
    with LocalKeeper.of(run, number).connected() as connection:
        return connection.open((1, 1.0, step), name)


def compare(found: Recalled, run: Path) -> None:
    on_disk = run / "checkpoints" / f"step-{found.step:08d}"
    for read in (read_weights, read_states):
        theirs, ours = read(on_disk), read(found.path)
        assert theirs.keys() == ours.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)
    assert read_progress(found.path) == read_progress(on_disk)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_state_in_memory_is_the_checkpoint_on_the_disk(optimizer: str, config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = Config.model_validate(config.model_dump(by_alias=True) | {"optimizer": {"type": optimizer}})
    assert trained(given) == []
    found, notes = recalled(run)
    assert found is not None and found.step == STEPS - 1 and notes == []
    compare(found, run)
    found.close()
    assert not list((run / "checkpoints").glob(".*"))


def test_a_state_is_read_once_to_compare_it(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(config)
    looks: list[str] = []
    honest = Comparison._sum

    def noted(self: Comparison, pieces: Any) -> int | str:
        looks.extend(piece.name for piece in pieces)
        return honest(self, pieces)

    monkeypatch.setattr(Comparison, "_sum", noted)
    found, _ = recalled(tmp_path / "run")
    assert found is not None and len(looks) == len(set(looks)) > 3 and PART in looks
    found.close()


def test_a_flipped_byte_is_noticed(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(config)
    handle = handle_of(run, PART, STEPS - 1)
    before = os.pread(handle, 1, 5000)
    os.pwrite(handle, bytes([before[0] ^ 1]), 5000)
    found, notes = recalled(run)
    os.close(handle)
    assert f"{PART} is damaged in its bytes" in notes[0] and "step 3" in notes[0]
    assert found is not None and found.step == STEPS - 2, "the state before it"
    compare(found, run)
    found.close()
    assert not list((run / "checkpoints").glob(".*"))


def test_a_part_of_another_step_is_not_taken(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(config)
    other = (run / "checkpoints" / f"step-{STEPS:08d}" / PART).read_bytes()
    with LocalKeeper.of(run, 0).connected() as connection:
        connection.put((1, 1.0, STEPS - 1), PART, other)
    found, notes = recalled(run)
    assert "is damaged" in notes[0] and found is not None and found.step == STEPS - 2
    found.close()


def test_a_state_counts_when_all_of_it_is_held(config: Config, tmp_path: Path) -> None:
    """The copy of the step after it is under way, and has been handed over, but not completed."""
    run = tmp_path / "run"
    trainer = quiet_trainer(config.changed({"checkpoint.every": 1}))
    memory = opened(run)
    keep(trainer, memory)
    saves = trainer.memory
    assert saves is not None
    trainer.run()
    assert keys(run)[-1] == (1, 1.0, STEPS - 1)
    with pytest.raises(ZeroDivisionError):
        saves._store.write_rest = lambda *_: 1 // 0
        trainer._begin_save(saves)
        saves.finish()
    found, notes = recalled(run)
    assert found is not None and found.step == STEPS - 1 and notes == []
    compare(found, run)
    found.close()


@pytest.mark.parametrize("killed", [[0], [1], [0, 1]])
def test_one_keeper_of_two_is_enough(killed: list[int], config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(config)
    for number in killed:
        with LocalKeeper.of(run, number).connected() as connection:
            os.kill(keeper.user_of(connection.socket)[0], signal.SIGKILL)
    until(lambda: not any(there(run, number) for number in killed))
    found, notes = recalled(run)
    assert (found is None) == (len(killed) == 2) and notes == []
    if found is not None:
        compare(found, run)
        found.close()


def there(run: Path, number: int) -> bool:
    try:
        with LocalKeeper.of(run, number).connected() as connection:
            return bool(keeper.started(keeper.user_of(connection.socket)[0]))
    except KeeperError:
        return False


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_keeper_that_is_lost_is_started_again(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    memory = opened(run)
    memory.end()
    until(lambda: not there(run, 0) and not there(run, 1))
    trainer = quiet_trainer(config)
    assert keep(trainer, memory) == []
    trainer.run()
    found, _ = recalled(run)
    assert found is not None and found.step == STEPS - 1
    found.close()


def test_a_full_keeper_is_told_of_and_the_run_goes_on(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    LocalKeeper.of(run, 1).start(1000, [os.getpid()])
    (said,) = trained(config)
    assert "the keeper refuses: it is full: 1,000 bytes are the most that it holds" in said
    found, _ = recalled(run)
    assert found is not None and found.step == STEPS - 1
    found.close()


def test_a_state_without_a_copy_is_told_of(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = trained(config, limit=1000)
    assert len(said) == 1 and "the state of this step is not kept" in said[0]
    assert recalled(run) == (None, [])


def test_where_the_next_state_does_not_fit_the_one_before_stands(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = config.changed({"checkpoint.every": 0, "checkpoint.in_memory_every": 1})
    two = kept_bytes(given, read_shape(given), layout_of(given, 1))
    (said,) = trained(config, limit=int(0.75 * two))
    assert "it is full" in said and "the state of this step is not kept" in said
    found, notes = recalled(run)
    assert found is not None and found.step == 1 and notes == []
    compare(found, run)
    found.close()


def test_a_commit_that_fails_leaves_the_state_before(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer, memory = quiet_trainer(config), opened(run)
    said, commits = keep(trainer, memory), memory.commit

    def commit(step: int) -> list[str]:
        return commits(step) if step == 1 else ["it is gone"] * 2

    memory.commit = commit  # type: ignore[method-assign]
    trainer.run()
    assert said == ["warning: a copy in memory is missing: it is gone: the state of this step is not kept"]
    found, notes = recalled(run)
    assert found is not None and found.step == 1 and notes == []
    compare(found, run)
    found.close()


def test_a_keeper_that_answers_late_is_told_what_counts(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(LocalKeeper, "start", lambda *_: None)
        memory = opened(tmp_path / "run")
    trainer = quiet_trainer(config)
    assert keep(trainer, memory) == []
    trainer.run()
    found, _ = recalled(tmp_path / "run")
    assert found is not None and found.step == STEPS - 1
    found.close()


@pytest.mark.parametrize("error", [MemoryError("no memory"), OSError("too many open files")])
@pytest.mark.parametrize("where", ["copy", "rest"])
def test_a_run_goes_on_without_a_copy_that_fails(
    where: str, error: Exception, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    if where == "copy":
        monkeypatch.setattr(SharedStaging, "_make_room", fails)
    else:
        monkeypatch.setattr(MemoryStore, "_write_rest", fails)
    (said,) = trained(config)
    assert str(error) in said and "the state of this step is not kept" in said
    assert (tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}").is_dir()
    assert recalled(tmp_path / "run") == (None, [])


def test_a_state_that_cannot_be_restored_is_forgotten(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trained(config)
    elastic = Elastic(Agent(os.getpid(), 1, 4), run, keeps=True)
    elastic.memory = asked(run, generation=2)
    elastic.recalled, _ = elastic.memory.recall(lambda key: True, 1, run / "checkpoints")
    assert elastic.recalled is not None

    def fails(*_: object) -> None:
        raise KeyError("no such field")

    monkeypatch.setattr("truestep.run.train.read_progress", fails)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-run")
    with pytest.raises(RankLostError, match=r"the state of step 3 in memory cannot be read: .*no such field.*the disk"):
        make_trainer(config, Console(quiet=True), elastic=elastic)
    elastic.recalled.close()
    assert recalled(run, generation=3) == (None, [])


def test_what_a_kill_leaves_does_not_stand_in_the_way(config: Config, tmp_path: Path) -> None:
    trained(config)
    first, _ = recalled(tmp_path / "run")
    second, _ = recalled(tmp_path / "run")
    assert first is not None and second is not None
    compare(second, tmp_path / "run")
    first.close()
    second.close()


def test_a_generation_that_has_ended_keeps_nothing(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(config)
    opened(run, generation=2)
    with (
        pytest.raises(KeeperError, match="a generation that has ended"),
        LocalKeeper.of(run, 0).connected() as connection,
    ):
        connection.put((1, 1.0, STEPS), PART, b"late")


LINES = [{"generation": 1, "time": 5.0, "step": 0}, {"generation": 2, "time": 6.0, "step": 8}]


@pytest.mark.parametrize(
    ("key", "stands"),
    [
        ((2, 6.0, 9), True),
        ((1, 5.0, 8), True),
        ((1, 5.0, 9), False),  # the second generation went on from before it
        ((1, 4.0, 8), False),  # another run's, in the same directory
        ((3, 7.0, 9), False),
    ],
)
def test_which_states_a_generation_may_go_on_from(key: Key, stands: bool) -> None:
    assert still_stands(key, LINES) == stands


def test_a_keeper_ends_with_the_processes_that_it_keeps_for(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    LocalKeeper.of(tmp_path / "run", 0).start(1000, [child.pid])
    assert there(tmp_path / "run", 0)
    child.kill()
    child.wait()
    until(lambda: not there(tmp_path / "run", 0))


def test_bytes_without_the_secret_are_not_read(tmp_path: Path) -> None:
    here = LocalKeeper.of(tmp_path / "run", 0)
    here.start(1000, [os.getpid()])
    fields: dict[str, Any] = {"generation": 1, "processes": [], "address": "127.0.0.1", "port": 0, "secret": "ab" * 32}
    with here.connected() as connection:
        port = connection.ask("hello", **fields)["port"]
    with RemoteKeeper("127.0.0.1", port, bytes.fromhex("ab" * 32)).connected() as connection:
        connection.put((1, 1.0, 1), "a", b"content")
        connection.ask("commit", set=[1, 1.0, 1])
        assert connection.read((1, 1.0, 1), "a", 3, 4) == b"tent"
        with pytest.raises(KeeperError, match="not for other machines"):
            connection.ask("end")
    wrong = RemoteKeeper("127.0.0.1", port, bytes.fromhex("cd" * 32))
    with pytest.raises(KeeperError, match="does not answer"), wrong.connected() as connection:
        connection.read((1, 1.0, 1), "a", 3, 4)


@pytest.mark.parametrize("message", [b"\0\0\0\4null", b"\xff\xff\xff\xff", b"\0\0\0\2{}", b"\0\0\0\5[[[[["])
def test_a_malformed_message_ends_its_connection_alone(message: bytes, tmp_path: Path) -> None:
    here = LocalKeeper.of(tmp_path / "run", 0)
    here.start(1000, [os.getpid()])
    with here.connected() as connection:
        connection.socket.sendall(message)
        assert connection.socket.recv(100) == b""
    assert there(tmp_path / "run", 0)


_DUMPABLE = 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect_and_no_process_opens_what_is_held(tmp_path: Path) -> None:
    here = LocalKeeper.of(tmp_path / "run", 0)
    here.start(1000, [os.getpid()])
    assert _as_nobody(lambda: _asks(here)) == "refused"
    assert _as_nobody(_opens_its_own) == "denied"


def _asks(here: LocalKeeper) -> str:
    with socket.socket(socket.AF_UNIX) as opened_socket:
        opened_socket.connect(f"\0{here.name}")
        try:
            keeper.send(opened_socket, {"ask": "hello", "generation": 1, "processes": []})
            return "refused" if not opened_socket.recv(4) else "answered"
        except OSError:
            return "refused"


def _opens_its_own() -> str:
    """A keeper of the same user: its files are listed by no other process."""
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # as a process is that has not changed its user
    assert os.listdir(f"/proc/{os.getpid()}/fd")
    name = f"truestep-test-{os.getpid()}"
    if not os.fork():
        os._exit(keeper.main(name, "1000", str(os.getppid())))
    os.wait()
    with LocalKeeper(name).connected() as connection:
        number = keeper.user_of(connection.socket)[0]
        connection.ask("hello", generation=1, processes=[])
        try:
            os.listdir(f"/proc/{number}/fd")
            return "listed"
        except PermissionError:
            return "denied"
        finally:
            connection.socket.close()


def _as_nobody(do: Callable[[], str]) -> str:
    """What a function returns in a process of another user."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(writes, do().encode())
        except BaseException as error:
            os.write(writes, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        said = told.read().decode()
    os.waitpid(child, 0)
    return said


def _run(config: Config) -> None:
    trained(config)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_kills_at_any_instant_leave_a_whole_state_or_none(seed: int, config: Config, tmp_path: Path) -> None:
    run, draw = tmp_path / "run", random.Random(seed)
    opened(run)  # keepers that survive
    longer = config.changed({"schedule.steps": 12})
    child = fork_context().Process(target=_run, args=[longer])
    child.start()
    metrics, step = run / "metrics.jsonl", draw.randrange(1, 9)
    until(lambda: metrics.is_file() and metrics.read_text().count("\n") >= step)
    time.sleep(draw.uniform(0.0, 0.05))
    child.kill()
    child.join()
    found, notes = recalled(run)
    assert notes == []
    assert step == 1 or (found is not None and found.step >= step - 1)
    if found is not None:
        whole = tmp_path / "whole"
        quiet_trainer(longer.changed({"checkpoint.directory": str(whole)})).run()
        compare(found, whole)
        found.close()


def test_the_plan_says_what_copies_take(config: Config, tmp_path: Path) -> None:
    given = config.changed({"checkpoint.every": 0, "checkpoint.in_memory_every": 1})
    trainer = quiet_trainer(config)
    keep(trainer, opened(tmp_path / "run"))
    trainer.run()
    assert trainer.memory is not None
    staging = trainer.memory._staging
    assert isinstance(staging, SharedStaging)
    taken = staging._room.nbytes + staging._other[0].nbytes
    assert taken == pytest.approx(kept_bytes(given, read_shape(given), layout_of(given, 1)), rel=0.1)


def test_without_an_elastic_launcher_it_is_refused(config: Config) -> None:
    with pytest.raises(TruestepError, match="only torchrun with --nnodes MIN:MAX does"):
        train(config.changed({"checkpoint.every": 0, "checkpoint.in_memory_every": 1}), Console(quiet=True))


@pytest.mark.parametrize("kept", [False, True])
def test_senders_do_not_hear_of_a_state_in_memory(kept: bool, tmp_path: Path) -> None:
    """What they acknowledge or announce must survive the loss of all memory."""
    heard: list[object] = []
    source = SimpleNamespace(checkpointed=heard.append)
    publication = SimpleNamespace(saved=lambda path, step, documents_seen: heard.append(path.name))
    supply: Any = SimpleNamespace(source=source, publication=publication)
    if kept:
        note_remote(tmp_path, {})
    _tell_again(supply, tmp_path, 3, 6)
    forget_remote(tmp_path)
    assert heard == ([] if kept else [6, tmp_path.name])
