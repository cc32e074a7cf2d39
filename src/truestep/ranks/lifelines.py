"""Connections between the first rank and ranks of other machines. The operating system closes a connection when a
process at its end has ended, however it ended, so that the watch of the other one sees it at once.

The connections carry nothing but a key and a rank. A machine that vanishes without a word is found by TCP's own probes.
"""

import contextlib
import json
import os
import secrets
import socket

import torch.distributed as dist

_KEY = "truestep/lifelines"
_PROBES = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds without a word, between probes; probes
_LONGEST = 64  # bytes of a key with its rank
_CONNECTS = 5.0  # seconds


class Lifelines:
    """The connections of one rank. All calls come from one thread, and none of them waits for another rank."""

    def __init__(self, rank: int, store: dist.Store):
        self._rank, self._store = rank, store
        self._key = secrets.token_hex(16)
        self._server: socket.socket | None = None  # of the first rank
        self._unknown: list[socket.socket] = []  # accepted, and not said yet whose they are
        self._open: dict[int, socket.socket] = {}  # by the rank at the other end
        self._tried = False
        self._ended: set[int] = set()

    def ended(self) -> set[int]:
        """Return the ranks whose processes have ended, as far as this rank is connected to them. Connect to the first
        rank, or accept the others."""
        with contextlib.suppress(OSError):
            self._accept() if self._rank == 0 else self._connect()
        for rank, line in list(self._open.items()):
            if _closed(line):
                line.close()
                del self._open[rank]
                self._ended.add(rank)
        return self._ended

    def close(self) -> None:
        for line in [*self._open.values(), *self._unknown, *([self._server] if self._server else [])]:
            line.close()
        self._open, self._unknown, self._server = {}, [], None

    def _accept(self) -> None:
        if self._server is None:
            self._server = _listen()
            self._store.set(_KEY, json.dumps([self._server.getsockname()[1], self._key]))
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._server.accept()
                line.setblocking(False)
                self._unknown.append(line)
        for line in list(self._unknown):
            try:
                said = line.recv(_LONGEST).decode("ascii", errors="replace").split()
            except BlockingIOError:
                continue
            self._unknown.remove(line)
            if len(said) == 2 and secrets.compare_digest(said[0], self._key) and said[1].isdecimal():
                _probe(line)
                self._open[int(said[1])] = line
            else:
                line.close()

    def _connect(self) -> None:
        if self._tried or not self._store.check([_KEY]):
            return
        self._tried = True
        port, key = json.loads(self._store.get(_KEY))
        line = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=_CONNECTS)
        line.sendall(f"{key} {self._rank}".encode())
        line.setblocking(False)
        _probe(line)
        self._open[0] = line


def _listen() -> socket.socket:
    """Listen at the address by which the other ranks know this machine, or at all addresses if it has none such."""
    try:
        family, *_, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 0, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address[:2], family=family)
    except OSError:
        server = socket.create_server(("", 0))
    server.setblocking(False)
    return server


def _probe(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _closed(line: socket.socket) -> bool:
    try:
        return line.recv(_LONGEST) == b""
    except BlockingIOError:
        return False
    except OSError:  # reset, or no answer to the probes
        return True
