"""The process that imports an environment and forks one process for each episode.

If an episode hangs, exits or writes too much, other episodes are not affected, and it can be killed alone. Each episode
has its own socket. This process passes frames between these sockets and its one connection to the run (`wire`), and
never reads their content. It adopts the orphans of ended episodes, and kills them. Imports no torch.
"""

import contextlib
import gc
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from truestep.environments import frames
from truestep.environments.descendants import children_of, kill_below, reap
from truestep.environments.episodes import wire
from truestep.environments.episodes.loading import Kind, UnusableError, load_environment, prepared
from truestep.environments.episodes.user_environment import run_episode
from truestep.environments.forked import adopt_orphans, seed_all
from truestep.environments.rewards import shown_value

_PORTION = 2**18
_MOST_WAITING = 2**25  # bytes waiting to be sent to the run; above this, no episode is read
_KILL_SECONDS = 2.0
_LONGEST_PROBLEM = 4000


def serve_episodes(channel: frames.Frames, start: dict[str, Any]) -> None:
    """Import the environment, send its tools, and serve its episodes until the connection ends."""
    known = {"nonce": start["nonce"]}
    try:
        kind, options = load_environment(start["environment"], start["options"])
        tools = prepared(kind, options)
        imported = frames.encode({**known, "tools": tools}, wire.LARGEST_ANSWER)
    except (UnusableError, frames.FrameError, TypeError, ValueError) as error:
        problem = frames.encode({**known, "problem": shown_value(error, str)[:_LONGEST_PROBLEM]})
        channel.send(wire.tagged(wire.IMPORTED, 0, problem[frames.HEADER :]))
        return
    channel.send(wire.tagged(wire.IMPORTED, 0, imported[frames.HEADER :]))
    _Forks(channel, kind, options).serve()


@dataclass(eq=False)
class _Running:
    """An episode and its process."""

    number: int
    process: int
    connection: socket.socket
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))  # unsent bytes of the current call
    answer: bytearray = field(default_factory=bytearray)  # received bytes of its answer
    is_asked: bool = False
    has_exited: bool = False
    why: str | None = None  # why it was killed


class _Forks:
    def __init__(self, channel: frames.Frames, kind: Kind, options: Mapping[str, Any]):
        self._channel, self._kind, self._options = channel, kind, options
        self._by_number: dict[int, _Running] = {}
        self._by_process: dict[int, _Running] = {}
        self._by_descriptor: dict[int, _Running] = {}  # only episodes that are still connected
        self._unsent: deque[memoryview] = deque()  # frames for the run
        self._num_unsent = 0  # bytes
        self._poll = select.poll()
        self._woken, self._wakes = os.pipe()

    def serve(self) -> None:
        """Serve until the run's connection ends."""
        adopt_orphans()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._poll.register(self._woken, select.POLLIN)
        seed_all("")  # imports numpy's generators here, so that not every episode has to
        gc.collect()
        gc.freeze()  # the garbage collector then does not write to memory that episodes share with this process
        while True:
            ready = self._ready()
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 1000)
            for descriptor in ready:
                if (one := self._by_descriptor.get(descriptor)) is not None:
                    self._read(one)
                    self._write(one)
            self._note_exits(reap())
            if self._channel.fileno() in ready:
                self._hear()
            self._send()

    def _ready(self) -> set[int]:
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        if self._num_unsent > _MOST_WAITING:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
        else:
            poll = self._poll
        poll.register(self._channel, events)
        return {descriptor for descriptor, _ in poll.poll()}

    # ---- the run

    def _hear(self) -> None:
        self._channel.fill()
        while (body := self._channel.take_body()) is not None:
            kind, number, rest = wire.untagged(body)
            one = self._by_number.get(number)
            if kind == wire.BEGIN:
                self._fork(number, rest)
            elif one is None:
                continue  # the episode has ended; the run gets a message about that
            elif kind == wire.CALL and one.why is None:
                self._ask(one, rest)
            elif kind == wire.CLOSE:
                self._kill(one, "closed")
            self._note_exits(reap())

    def _say(self, kind: bytes, number: int, rest: bytes = b"") -> None:
        frame = wire.tagged(kind, number, rest)
        self._unsent.append(memoryview(frame))
        self._num_unsent += len(frame)

    def _send(self) -> None:
        while self._unsent:
            first = self._unsent.popleft()
            rest = self._channel.send_some(first)
            self._num_unsent -= len(first) - len(rest)
            if rest:
                self._unsent.appendleft(rest)
                return

    def _gone(self, number: int, code: int | None, process: int, why: str | None) -> None:
        message = frames.encode({"code": code, "process": process, "why": why})
        self._say(wire.GONE, number, message[frames.HEADER :])

    # ---- episodes

    def _fork(self, number: int, request: bytes) -> None:
        parent = os.getpid()
        try:
            ours, theirs = frames.connected()
        except OSError as error:
            self._gone(number, None, 0, f"could not be given a process: {error.strerror}")
            return
        try:
            process = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._gone(number, None, 0, f"could not be given a process: {error.strerror}")
            return
        if process == 0:
            self._become_episode(ours, theirs, parent)
        theirs.close()
        ours.setblocking(False)
        one = _Running(number, process, ours)
        self._by_number[number] = self._by_process[process] = self._by_descriptor[ours.fileno()] = one
        self._poll.register(ours, select.POLLIN)
        self._say(wire.FORKED, number)
        self._ask(one, request)

    def _become_episode(self, ours: socket.socket, theirs: socket.socket, parent: int) -> None:
        """Close the descriptors of the parent and of other episodes, run the episode, and never return. The forked
        process calls this."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in self._by_descriptor.values():
                one.connection.close()
            self._channel.close()
            ours.close()
            os.close(self._woken)
            os.close(self._wakes)
            channel = frames.Frames(theirs, frames.LARGEST_REQUEST)
            run_episode(channel, parent, self._kind, self._options)
        finally:
            os._exit(1)

    def _ask(self, one: _Running, request: bytes) -> None:
        one.is_asked = True
        one.unsent = memoryview(frames.framed(request))
        self._write(one)

    def _write(self, one: _Running) -> None:
        if one.connection.fileno() not in self._by_descriptor:
            return
        before = bool(one.unsent)
        try:
            while one.unsent:
                one.unsent = one.unsent[one.connection.send(one.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the episode's process has exited; its last bytes are still read
            one.unsent = memoryview(b"")
        if before:
            self._poll.modify(one.connection, select.POLLIN | (select.POLLOUT if one.unsent else 0))

    def _read(self, one: _Running) -> None:
        """Read from an episode, and pass on an answer when it is complete. Kill the episode if it writes too much, or
        writes without being asked."""
        try:
            portion = one.connection.recv(_PORTION)
        except BlockingIOError:
            return
        except OSError:
            portion = b""
        if not portion:  # the episode's process has exited, or has closed its connection
            self._kill(one, None)
            return
        one.answer += portion
        length = frames.length_of(one.answer)
        if length is not None and length > frames.HEADER + wire.LARGEST_ANSWER:
            self._kill(one, f"wrote {length} bytes to the connection of its process; at most {wire.LARGEST_ANSWER}")
        elif not one.is_asked or one.unsent or (length is not None and len(one.answer) > length):
            self._kill(one, "wrote to the connection of its process")
        elif len(one.answer) == length:
            self._say(wire.ANSWER, one.number, bytes(one.answer[frames.HEADER :]))
            one.answer.clear()
            one.is_asked = False

    def _kill(self, one: _Running, why: str | None) -> None:
        """Kill an episode and all its descendants. The run is told of its end when the process has exited."""
        one.why = one.why or why
        self._disconnect(one)
        if one.has_exited:
            return
        with contextlib.suppress(OSError):
            os.kill(one.process, signal.SIGSTOP)  # so that it starts no more processes
            kill_below(one.process, _KILL_SECONDS)
            os.kill(one.process, signal.SIGKILL)

    def _disconnect(self, one: _Running) -> None:
        if self._by_descriptor.pop(one.connection.fileno(), None) is not None:
            self._poll.unregister(one.connection)
            one.connection.close()

    def _note_exits(self, statuses: dict[int, int]) -> None:
        """Tell the run which episodes have exited, and kill the orphans that they left."""
        while statuses:
            exited = [(self._by_process.pop(pid), code) for pid, code in statuses.items() if pid in self._by_process]
            statuses = self._kill_orphans() if exited else {}
            for one, status in exited:
                one.has_exited = True
                while one.connection.fileno() in self._by_descriptor:  # read its last bytes
                    self._read_last(one)
                del self._by_number[one.number]
                self._gone(one.number, os.waitstatus_to_exitcode(status), one.process, one.why)

    def _read_last(self, one: _Running) -> None:
        before = len(one.answer)
        self._read(one)
        if one.connection.fileno() in self._by_descriptor and len(one.answer) == before:
            self._disconnect(one)

    def _kill_orphans(self) -> dict[int, int]:
        """Kill the children of this process that are not episodes. Return the statuses of all processes that were
        reaped."""
        if set(children_of(os.getpid())) <= set(self._by_process):
            return {}
        return kill_below(os.getpid(), _KILL_SECONDS, frozenset(self._by_process))
