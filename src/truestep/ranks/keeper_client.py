"""Talks to the keepers of a run's state: starts them, sends them parts, and reads parts."""

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.process import progress
from truestep.ranks import keeper
from truestep.ranks.elastic import RankLostError
from truestep.ranks.keeper import Key
from truestep.ranks.processes import machine, machine_memory

_PATIENCE = 20.0  # seconds for an answer


class KeeperError(RankLostError):
    """A keeper cannot be reached, or refuses a request."""


@dataclass(frozen=True)
class RemoteKeeper:
    """The keeper of another machine."""

    host: str
    port: int
    secret: bytes

    @contextlib.contextmanager
    def connected(self) -> Iterator["Connection"]:
        address = self.host, self.port
        if not self.port:
            raise KeeperError(f"the keeper of {self.host or 'another machine'} has no address that this one can reach")
        with _failures(f"the keeper of {self.host}"), socket.create_connection(address, _PATIENCE) as opened:
            nonce = bytes(keeper.receive_bytes(opened, keeper.NONCE))
            own = secrets.token_bytes(keeper.NONCE)
            opened.sendall(keeper.answer_to(self.secret, b"rank" + nonce) + own)
            told = bytes(keeper.receive_bytes(opened, keeper.NONCE))
            if not hmac.compare_digest(told, keeper.answer_to(self.secret, b"keeper" + own)):
                raise KeeperError(f"what listens on {self.host} is not a keeper of this generation")
            yield Connection(opened)


@dataclass(frozen=True)
class LocalKeeper:
    """A keeper of this machine."""

    name: str

    @staticmethod
    def of(run: Path, number: int) -> "LocalKeeper":
        """Return one of the run's keepers on this machine, by its number."""
        told = hashlib.sha256(f"{machine_key()} {run.resolve()}".encode()).hexdigest()[:24]
        return LocalKeeper(f"truestep-keeper-{os.geteuid()}-{told}-{number}")

    def start(self, limit: int, processes: Sequence[int]) -> None:
        """Start the keeper, unless another process has."""
        program, words = keeper.__file__, [self.name, str(limit), *map(str, processes)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a later request to the keeper then fails
            subprocess.run(
                [sys.executable, "-I", "-S", program, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=_PATIENCE,
                check=False,
            )

    @contextlib.contextmanager
    def connected(self) -> Iterator["Connection"]:
        with _failures("the keeper of this machine"), socket.socket(socket.AF_UNIX) as opened:
            opened.settimeout(_PATIENCE)
            opened.connect(f"\0{self.name}")
            if keeper.user_of(opened)[1] != os.geteuid():
                raise KeeperError("the keeper of this machine belongs to another user")
            yield Connection(opened)


Keeper = LocalKeeper | RemoteKeeper


@contextlib.contextmanager
def _failures(whose: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise KeeperError(f"{whose} does not answer: {error or type(error).__name__}") from error


@dataclass(frozen=True)
class Connection:
    socket: socket.socket

    def ask(self, what: str, handle: int | None = None, **fields: Any) -> dict[str, Any]:
        return self._ask(what, [] if handle is None else [handle], fields)[0]

    def _ask(self, what: str, handles: Sequence[int], fields: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
        keeper.send(self.socket, {"ask": what, **fields}, handles=handles)
        return self._answer()

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        reply, given = keeper.receive(self.socket)
        if "refused" in reply:
            raise KeeperError(f"the keeper refuses: {reply['refused']}")
        return reply, given

    def put(self, key: Key, name: str, content: Any, handle: int | None = None, standing: Key | None = None) -> None:
        """Hand a file over: its memory, or its bytes to another machine. `standing`: the set that the keeper must
        keep."""
        stands = None if standing is None else list(standing)
        if handle is not None and self.socket.family == socket.AF_UNIX:
            self.ask("put", handle=handle, set=list(key), name=name, standing=stands)
        else:
            self.ask("put", size=len(content), set=list(key), name=name, standing=stands)  # raises if it has no room
            rest = memoryview(content)
            while rest:
                self.socket.sendall(rest[: keeper.PIECE])
                progress.made("bytes handed over to keepers", len(rest[: keeper.PIECE]))
                rest = rest[keeper.PIECE :]
            self._answer()

    def open(self, key: Key, name: str) -> int:
        """Return a handle of a file's memory."""
        return self._ask("open", (), {"set": list(key), "name": name})[1][0]

    def read(self, key: Key, name: str, start: int, count: int) -> bytearray:
        reply = self.ask("read", set=list(key), name=name, start=start, count=count)
        return keeper.receive_bytes(self.socket, int(reply["bytes"]))


def machine_key() -> str:
    """Return an id of the memory and the network from which a machine's keepers can be reached."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{machine()} {network}"


def default_limit() -> int:
    """Return the most bytes that a keeper holds, if no option says so: half of the machine's memory."""
    return machine_memory() // 2
