"""Keeps the parts of a run's last state in host memory, for ranks that are started again.

    python keeper.py NAME LIMIT PROCESS...

This is a separate program in a session of its own, so it survives the ranks that it keeps parts for. It imports nothing
of truestep. NAME: its Unix socket, in the abstract namespace, which leaves no file. LIMIT: the most bytes that it
holds. PROCESS: ids of agents and ranks. The keeper ends when all agents and ranks that it knows have ended.

Parts are anonymous memory. A rank of this machine copies its part to such memory and passes the memory on, so the
keeper copies nothing. A rank of another machine sends the bytes, over a connection that it opens with a secret. On this
machine only processes of the same user can connect, and no other user can open the memory.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import hmac
import json
import mmap
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_DUMPABLE = 4  # an option of prctl
_POLL_SECONDS = 0.5
_PATIENCE = 60.0  # seconds without a byte or a request, after which a connection is closed
_MOST_UNKNOWN = 64  # most connections of other machines that have not yet proved that they know the secret
_LONGEST = 1 << 26  # bytes of a message, without the content that follows it
PIECE = 1 << 20
_FOR_OTHER_MACHINES = ("put", "commit", "read", "forget")
NONCE = 32  # bytes

Key = tuple[int, float, int]  # generation, when it began, and step


def send(connection: socket.socket, message: dict[str, Any], content: Any = b"", handles: Sequence[int] = ()) -> None:
    """Send a message, with the content of a file or with handles of files."""
    text = json.dumps(message | {"bytes": len(content)}).encode()
    frame = len(text).to_bytes(4, "big")
    if handles:
        socket.send_fds(connection, [frame], list(handles))
    else:
        connection.sendall(frame)
    connection.sendall(text)
    rest = memoryview(content)
    while rest:  # in pieces, because a socket's timeout applies to a whole call
        connection.sendall(rest[:PIECE])
        rest = rest[PIECE:]


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message and its handles. The caller then receives the message's content, of `bytes` bytes."""
    handles: list[int] = []
    if connection.family == socket.AF_UNIX:
        frame, handles, *_ = socket.recv_fds(connection, 4, 4)
    else:
        frame = connection.recv(4)
    if not frame:
        raise EOFError
    try:
        frame += receive_bytes(connection, 4 - len(frame))
        if (length := int.from_bytes(frame, "big")) > _LONGEST:
            raise ValueError("a message is too long")
        message = json.loads(receive_bytes(connection, length))
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    return message, handles


def receive_bytes(connection: socket.socket, count: int) -> bytearray:
    content = bytearray(count)
    receive_into(connection, memoryview(content))
    return content


def receive_into(connection: socket.socket, room: memoryview) -> None:
    while room:
        count = connection.recv_into(room[:PIECE])
        if not count:
            raise EOFError
        room = room[count:]


def user_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", packed)
    return process, user


def answer_to(secret: bytes, nonce: bytes) -> bytes:
    return hmac.new(secret, nonce, hashlib.sha256).digest()


def started(process: int) -> int:
    """Return the start time of a process by the kernel's clock; 0 if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def new_memory(count: int) -> int:
    """Make anonymous memory whose size cannot change; return its handle."""
    handle = os.memfd_create("truestep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(handle, 0o600)
    os.ftruncate(handle, count)
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return handle


class _Refused(Exception):  # noqa: N818 - it carries an answer
    """A request that is not granted."""


class _Set:
    """The files of one state that this keeper holds. Other keepers may hold further ones."""

    def __init__(self) -> None:
        self.handles: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.complete = False

    def forget(self) -> None:
        for handle in self.handles.values():
            os.close(handle)


class _Keeper:
    def __init__(self, limit: int, processes: Sequence[int]):
        self._limit = limit
        self._sets: dict[Key, _Set] = {}
        self._generation = 0
        self._unknown = threading.Semaphore(_MOST_UNKNOWN)
        self._coming = 0  # bytes that are being received
        self._lock = threading.Lock()
        self._processes = {process: started(process) for process in processes}
        self._secret = b""
        self._listener: socket.socket | None = None
        self._port, self._address = 0, ""

    def watch(self) -> None:
        """End when no agent and no rank is left."""
        while True:
            with self._lock:
                known = dict(self._processes)
            with contextlib.suppress(OSError):  # such as too many open files; check again later
                self._end_if_alone(known)
            time.sleep(_POLL_SECONDS)

    def _end_if_alone(self, known: dict[int, int]) -> None:
        if not any(began and started(process) == began for process, began in known.items()):
            os._exit(0)

    def accept(self, listener: socket.socket, trusted: Callable[[socket.socket], bool]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # such as too many open files
                if listener.fileno() < 0:
                    return
                time.sleep(_POLL_SECONDS)
                continue
            connection.settimeout(_PATIENCE)
            if connection.family != socket.AF_UNIX and not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection, trusted), daemon=True).start()

    def _serve(self, connection: socket.socket, trusted: Callable[[socket.socket], bool]) -> None:
        with connection, contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            try:
                if not trusted(connection):
                    return
            finally:
                if connection.family != socket.AF_UNIX:
                    self._unknown.release()
            while True:
                message, handles = receive(connection)
                try:
                    reply, content, given = self._answer(connection, message, handles)
                except _Refused as refused:
                    reply, content, given = {"refused": str(refused)}, b"", []
                finally:
                    for handle in handles:
                        os.close(handle)
                try:
                    send(connection, reply, content, given)
                finally:
                    for handle in given:
                        os.close(handle)

    def of_this_user(self, connection: socket.socket) -> bool:
        return user_of(connection)[1] == os.geteuid()

    def knows_secret(self, connection: socket.socket) -> bool:
        nonce = secrets.token_bytes(NONCE)
        connection.sendall(nonce)
        given, asked = (bytes(receive_bytes(connection, NONCE)) for _ in range(2))
        if not self._secret or not hmac.compare_digest(given, answer_to(self._secret, b"rank" + nonce)):
            return False
        connection.sendall(answer_to(self._secret, b"keeper" + asked))
        return True

    def _answer(
        self, connection: socket.socket, message: dict[str, Any], handles: list[int]
    ) -> tuple[dict[str, Any], Any, list[int]]:
        what = message["ask"]
        if connection.family != socket.AF_UNIX and what not in _FOR_OTHER_MACHINES:
            raise _Refused(f"{what} is not for other machines")
        if what == "hello":
            return self._hello(connection, message), b"", []
        if what == "put":
            self._put(connection, message, handles)
            return {}, b"", []
        if what == "commit":
            self._commit(_key(message))
            return {}, b"", []
        if what == "open":
            with self._lock:
                return {}, b"", [os.dup(self._held(message))]
        if what == "read":
            with self._lock:
                handle = os.dup(self._held(message))
            try:
                return {}, os.pread(handle, int(message["count"]), int(message["start"])), []
            finally:
                os.close(handle)
        if what in ("end", "forget"):
            if message["generation"] < self._generation:
                raise _Refused("this rank is of a generation that has ended")
            if what == "end":
                os._exit(0)
            with self._lock:
                self._forget(lambda key, _: True)
            return {}, b"", []
        raise _Refused(f"{what} is unknown")

    def _hello(self, connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if message["generation"] < self._generation:
                raise _Refused("this rank is of a generation that has ended")
            for process in (user_of(connection)[0], *message["processes"]):
                self._processes[process] = started(process)
            self._processes = {process: began for process, began in self._processes.items() if began}
            self._generation = message["generation"]
            if message.get("address"):
                self._listen(message["address"], message["port"], bytes.fromhex(message["secret"]))
            held = [{"set": list(key), "complete": one.complete, "files": one.sizes} for key, one in self._sets.items()]
            return {"sets": held, "port": self._port, "held": self._size(), "limit": self._limit}

    def _listen(self, address: str, port: int, secret: bytes) -> None:
        """Listen at an address of this machine. If the address is new, stop listening at the old one."""
        self._secret = secret
        if self._listener is not None and self._address == address:
            return
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends its thread
            self._listener.close()
        self._listener, self._port, self._address = None, 0, address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for wanted in (port, 0):  # first the port of the keeper before this one, because other keepers know it
            with contextlib.suppress(OSError):
                self._listener = socket.create_server((address, wanted), family=family)
                self._port = self._listener.getsockname()[1]
                threading.Thread(target=self.accept, args=(self._listener, self.knows_secret), daemon=True).start()
                return

    def _put(self, connection: socket.socket, message: dict[str, Any], handles: list[int]) -> None:
        key, name = _key(message), str(message["name"])
        size = os.fstat(handles[0]).st_size if handles else int(message["size"])
        with self._lock:
            if key[0] < self._generation:
                raise _Refused("the set is of a generation that has ended")
            if key not in self._sets:
                standing = message.get("standing")
                self._forget(lambda other, _: standing is None or other != tuple(standing))
                self._sets[key] = _Set()
            before = self._sets[key].sizes.get(name, 0)
            if self._size() + self._coming + size - before > self._limit:
                raise _Refused(f"it is full: {self._limit:,} bytes are the most that it holds")
            self._coming += size
        handle = -1
        try:
            handle = os.dup(handles[0]) if handles else self._receive(connection, size)
        finally:
            with self._lock:
                self._coming -= size
                if handle >= 0:
                    self._add(key, name, handle, size)

    def _add(self, key: Key, name: str, handle: int, size: int) -> None:
        held = self._sets.get(key)
        if held is None:  # the set was forgotten meanwhile
            os.close(handle)
            return
        if name in held.handles:
            os.close(held.handles[name])
        held.handles[name], held.sizes[name] = handle, size

    def _receive(self, connection: socket.socket, size: int) -> int:
        handle = new_memory(size)
        try:
            send(connection, {})  # tells the sender that there is room
            if size:
                with mmap.mmap(handle, size) as memory, memoryview(memory) as room:
                    receive_into(connection, room)
            return handle
        except BaseException:
            os.close(handle)
            raise

    def _commit(self, key: Key) -> None:
        """Mark a set as complete. The set before it is kept until the next one comes, because other keepers may not
        have this set."""
        with self._lock:
            if key[0] < self._generation or key not in self._sets:
                raise _Refused("there is no such set")
            self._sets[key].complete = True

    def _held(self, message: dict[str, Any]) -> int:
        try:
            return self._sets[_key(message)].handles[message["name"]]
        except KeyError:
            raise _Refused("the set has no such file") from None

    def _forget(self, which: Callable[[Key, _Set], bool]) -> None:
        for key in [key for key, held in self._sets.items() if which(key, held)]:
            self._sets.pop(key).forget()

    def _size(self) -> int:
        """Count the bytes that are held. Two files may be the same memory."""
        sizes = {}
        for handle in self._handles():
            facts = os.fstat(handle)
            sizes[facts.st_ino] = facts.st_size
        return sum(sizes.values())

    def _handles(self) -> Iterator[int]:
        for held in self._sets.values():
            yield from held.handles.values()


def _key(message: dict[str, Any]) -> Key:
    generation, began, step = message["set"]
    return int(generation), float(began), int(step)


def main(name: str, limit: str, *processes: str) -> int:
    reads, writes = os.pipe()
    if os.fork():  # the process that started it need not wait for its end
        os.close(writes)
        return 0 if os.read(reads, 1) else 1
    os.close(reads)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return 1  # another keeper has the name
    listener.listen(64)
    os.write(writes, b"1")
    os.close(writes)
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DUMPABLE, 0, 0, 0, 0)  # otherwise processes of this user could open its memory
    keeper = _Keeper(int(limit), [int(process) for process in processes])
    threading.Thread(target=keeper.accept, args=(listener, keeper.of_this_user), daemon=True).start()
    keeper.watch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
