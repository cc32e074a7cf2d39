"""Keepers of states in memory: late, lost and hostile ranks take nothing, and leave nothing behind."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.test_memory import there, until
from truestep.ranks import keeper
from truestep.ranks.axes import RankLayout
from truestep.ranks.elastic import Agent
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.keeper import Key
from truestep.ranks.keeper_client import KeeperError, LocalKeeper, RemoteKeeper
from truestep.run.checkpoint import memory as memories
from truestep.run.checkpoint.checksums import MANIFEST, manifest_of
from truestep.run.checkpoint.memory import Memory, _Answer, _Held, _new_directory
from truestep.weights.tensor_parts import FOLDER

SECRET, OTHER = b"a" * 32, b"b" * 32
FEW = 40  # open files
_START = """
import importlib.util, resource, sys
found = importlib.util.spec_from_file_location("keeper", sys.argv[1])
keeper = importlib.util.module_from_spec(found)
found.loader.exec_module(keeper)
keeper._PATIENCE = float(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(keeper.main(*sys.argv[4:]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    for number in range(4):
        try:
            with LocalKeeper.of(tmp_path / "run", number).connected() as connection:
                connection.ask("end", generation=99)
        except KeeperError:
            pass


def start(run: Path, number: int = 0, limit: int = 1000, patience: float = 60.0, files: int = 0) -> LocalKeeper:
    made = LocalKeeper.of(run, number)
    files = files or resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    words = [keeper.__file__, str(patience), str(files), made.name, str(limit), str(os.getpid())]
    subprocess.run([sys.executable, "-I", "-c", _START, *words], check=True, start_new_session=True)
    return made


def hello(to: LocalKeeper, generation: int = 1, secret: bytes = SECRET, address: str = "127.0.0.1") -> dict[str, Any]:
    fields: dict[str, Any] = {"address": address, "port": 0, "secret": secret.hex()}
    with to.connected() as connection:
        return connection.ask("hello", generation=generation, processes=[], **fields)


def put(to: LocalKeeper | RemoteKeeper, step: int, content: bytes = b"x", standing: int | None = None) -> None:
    with to.connected() as connection:
        connection.put((1, 1.0, step), "a", content, standing=None if standing is None else (1, 1.0, standing))


def commit(to: LocalKeeper, step: int) -> None:
    with to.connected() as connection:
        connection.ask("commit", set=[1, 1.0, step])


def test_a_kill_between_two_commits_leaves_the_state_before_on_every_keeper(run: Path) -> None:
    keepers = [start(run, number) for number in range(4)]
    for one in keepers:
        hello(one)
        put(one, 1)
        commit(one, 1)
    for one in keepers:
        put(one, 2, standing=1)
    for one in keepers[:2]:
        commit(one, 2)
    told = [hello(one, generation=2)["sets"] for one in keepers]
    complete = [[held["set"][2] for held in sets if held["complete"]] for sets in told]
    assert complete == [[1, 2], [1, 2], [1], [1]]


def test_a_rank_of_an_older_generation_changes_nothing(run: Path) -> None:
    one = start(run)
    port = hello(one, generation=2, secret=OTHER)["port"]
    with pytest.raises(KeeperError, match="a generation that has ended"):
        hello(one, generation=1, secret=SECRET)
    for what in ("end", "forget"):
        with pytest.raises(KeeperError, match="a generation that has ended"), one.connected() as connection:
            connection.ask(what, generation=1)
    with RemoteKeeper("127.0.0.1", port, OTHER).connected() as connection:
        connection.put((2, 2.0, 1), "a", b"content")


def test_a_peer_that_vanishes_frees_what_it_would_have_taken(run: Path) -> None:
    one = start(run, limit=1000, patience=0.3)
    remote = RemoteKeeper("127.0.0.1", hello(one)["port"], SECRET)
    with remote.connected() as connection:
        keeper.send(connection.socket, {"ask": "put", "set": [1, 1.0, 1], "name": "p", "size": 600, "standing": None})
        assert "refused" not in keeper.receive(connection.socket)[0]
        connection.socket.sendall(b"z" * 100)
        with pytest.raises(KeeperError, match="it is full"):
            put(one, 1, b"y" * 600)

        def fits() -> bool:
            try:
                put(one, 1, b"y" * 600)
                return True
            except KeeperError:
                return False

        until(fits)


def test_what_does_not_fit_is_refused_before_it_is_sent(run: Path) -> None:
    remote = RemoteKeeper("127.0.0.1", hello(start(run, limit=1000))["port"], SECRET)
    with remote.connected() as connection:
        keeper.send(connection.socket, {"ask": "put", "set": [1, 1.0, 1], "name": "p", "size": 2000, "standing": None})
        assert "it is full" in keeper.receive(connection.socket)[0]["refused"]
        connection.put((1, 1.0, 1), "q", b"fits")


def test_a_new_generation_has_another_secret(run: Path) -> None:
    one = start(run)
    port = hello(one)["port"]
    put(RemoteKeeper("127.0.0.1", port, SECRET), 1)
    assert hello(one, generation=2, secret=OTHER)["port"] == port
    with pytest.raises(KeeperError, match="does not answer"):
        put(RemoteKeeper("127.0.0.1", port, SECRET), 2)
    with RemoteKeeper("127.0.0.1", port, OTHER).connected() as connection:
        connection.put((2, 2.0, 1), "a", b"content")


def test_a_long_send_makes_progress(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, made = os.urandom(5 * keeper.PIECE // 2), list[float]()
    remote = RemoteKeeper("127.0.0.1", hello(start(run, limit=len(content)))["port"], SECRET)
    monkeypatch.setattr("truestep.process.progress.made", lambda what, amount=1.0: made.append(amount))
    put(remote, 1, content)
    assert made == [keeper.PIECE, keeper.PIECE, keeper.PIECE // 2]
    with remote.connected() as connection:
        assert connection.read((1, 1.0, 1), "a", 0, len(content)) == content


def test_idle_connections_without_the_secret_do_not_end_a_keeper(run: Path) -> None:
    one = start(run, files=FEW)
    port = hello(one)["port"]
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * FEW)]
    time.sleep(3 * keeper._POLL_SECONDS)  # it looks for processes meanwhile
    for connection in idle:
        connection.close()
    until(lambda: there(run, 0))
    assert hello(one)["limit"] == 1000
    put(RemoteKeeper("127.0.0.1", port, SECRET), 1)


def test_what_is_no_keeper_gets_nothing() -> None:
    got: list[bytes] = []

    def listens(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"n" * keeper.NONCE)
            answer = bytes(keeper.receive_bytes(connection, 2 * keeper.NONCE))
            connection.sendall(answer[: keeper.NONCE])  # what a rank says is no answer to it
            got.append(connection.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listens, args=(server,))
        thread.start()
        with pytest.raises(KeeperError, match="is not a keeper of this generation"):
            put(RemoteKeeper("127.0.0.1", server.getsockname()[1], SECRET), 1, b"weights")
        thread.join()
    assert got == [b""]


def test_a_keeper_listens_at_its_new_address_alone(run: Path) -> None:
    one = start(run)
    before = hello(one, address="127.0.0.1")["port"]
    after = hello(one, generation=2, secret=OTHER, address="127.0.0.2")["port"]
    with RemoteKeeper("127.0.0.2", after, OTHER).connected() as connection:
        connection.put((2, 2.0, 1), "a", b"content")
    with pytest.raises(KeeperError, match="does not answer"):
        put(RemoteKeeper("127.0.0.1", before, OTHER), 1)
    assert hello(one, generation=2, secret=OTHER, address="203.0.113.1")["port"] == 0, "no address of this machine"


@pytest.mark.parametrize(
    ("own", "others", "address"),
    [
        ("10.0.0.1", ["10.0.0.1", "10.0.0.1"], "10.0.0.1"),
        ("127.0.1.1", ["127.0.1.1", "10.0.0.1"], "10.0.0.1"),  # a machine whose name means itself, on itself
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        ("", ["", ""], ""),
    ],
)
def test_the_first_machine_listens_where_others_look_for_it(
    own: str, others: list[str], address: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = memories.machine_key()
    ranks: Any = SimpleNamespace(gather=lambda _: [(first, others[0]), ("another machine", others[1])])
    made = Memory(ranks, run, Agent(os.getpid(), 1, 4), 1000, 1, SECRET)
    monkeypatch.setattr(memories, "_addresses", lambda: (own, others[0]))
    assert made._own_address(first) == address


def test_a_machine_without_an_address_is_told_of() -> None:
    with pytest.raises(KeeperError, match="has no address that this one can reach"):
        put(RemoteKeeper("", 0, SECRET), 1)


def test_a_generation_that_goes_on_from_the_disk_forgets_what_is_in_memory(run: Path) -> None:
    """What it goes on from may be older than its line says, where a checkpoint is found damaged."""

    def asked(generation: int) -> Memory:
        return Memory.open(ALONE, run, Agent(os.getpid(), 1, 4), 1000, generation)

    first = asked(1)
    first.begin(1.0)
    assert first.hand_over(8, {"a": b"x"}, {}) == first.commit(8) == []
    assert len(first._complete(lambda key: True, 1)) == 0 and len(asked(1)._complete(lambda key: True, 1)) == 1
    asked(2).begin(2.0)
    assert asked(3)._complete(lambda key: True, 1) == []


@pytest.mark.parametrize("harmed", range(8))
def test_a_file_that_one_rank_cannot_link_leaves_no_other_unread(
    harmed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a machine share what they compare, each a part, and one of them has no file left to open."""
    names = [f"{FOLDER}/{number}" for number in range(8)]
    (tmp_path / "held").mkdir()
    for name in names:
        (tmp_path / "held" / Path(name).name).write_bytes(b"harmed" if name == names[harmed] else b"whole!")

    class Here:
        def __init__(self, rank: int):
            self.rank = rank

        def open(self, key: Key, name: str) -> int:
            if self.rank == 1 and name == names[0]:
                raise KeeperError("too many open files")
            return os.open(tmp_path / "held" / Path(name).name, os.O_RDONLY)

    told, together = [None, None], threading.Barrier(2, timeout=20)

    class Two(Ranks):
        def gather(self, value: Any, ahead: bool = False, sampling: bool = False) -> list[Any]:
            told[self.rank] = value
            together.wait()
            values = list(told)
            together.wait()
            return values

    def bad(rank: int) -> dict[tuple[str, str], str]:
        made = Memory(Two(rank, RankLayout(data_shard=2)), tmp_path / "run", Agent(1, 1, 4), 1000, 1, SECRET)
        made._answers = [_Answer(memories.machine_key(), "", {}, {})] * 2
        here = SimpleNamespace(connected=partial(nullcontext, Here(rank)))
        monkeypatch.setattr(made, "_at", lambda number: here)
        recalled = _new_directory(tmp_path / f"checkpoints-{rank}", 1)
        (recalled.path / MANIFEST).write_bytes(manifest_of(dict.fromkeys(names, b"whole!"), {}))
        found = made._bad(names, _Held((1, 1.0, 1), {}, dict.fromkeys(names, 0)), recalled)
        recalled.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        found, same = pool.map(bad, (0, 1))
    assert found == same and {name for _, name in found} == {names[0], names[harmed]}
    assert found[memories.machine_key(), names[0]] == "too many open files"
