"""The process between the run and a worker: it starts the worker, enforces its limits, and kills all its descendants.

A reward may start processes that move to other sessions or outlive their parents. The supervisor adopts orphaned
descendants (PR_SET_CHILD_SUBREAPER). It kills all its descendants when the run asks, when the worker exits, or when the
run exits. It never runs a user's code itself. If the worker is isolated, the supervisor is the first process of the
namespaces (`isolation`), which end with it.

    python -P -m truestep.environments.supervisor     stdin: a socket for control frames from and to the run
                                                      stdout: a socket for requests from the run, and their answers
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from truestep.environments import frames, isolation
from truestep.environments.descendants import Children, kill_below, reap
from truestep.environments.forked import adopt_orphans
from truestep.environments.limits import EpisodeLimits, Limits
from truestep.environments.relay import Relay

_TICK = 0.1  # longest wait in seconds, so that limits are checked
_KEPT_OUTPUT = 2000  # last bytes of a reward's output that are kept


def main() -> None:
    null = os.open(os.devnull, os.O_RDWR)  # opened first, so that it does not get descriptor 0, 1 or 2
    channel = os.dup(1)
    control = frames.from_descriptor(0, frames.LARGEST_REQUEST)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        start = control.receive()
    except (frames.EndOfFramesError, frames.FrameError):
        return
    try:
        if start["room"] is not None:
            isolation.enter(start["room"])
    except isolation.IsolationError as error:
        control.send(frames.encode({"ended": None, "breach": f"the {start['what']} could not be isolated: {error}"}))
        return
    isolation.hide()
    run = os.getppid()  # 0 for an isolated supervisor, whose parent is outside its PID namespace and kills it
    adopt_orphans()
    output, printed = os.pipe()
    ours, theirs = frames.connected()
    supervisor, worker = os.getpid(), os.fork()
    if worker == 0:
        control.close()
        ours.close()
        os.close(channel)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        for number in (output, printed, null):
            os.close(number)
        from truestep.environments.worker import work  # imported late: only the worker needs it

        work(theirs.detach(), supervisor, start)
    theirs.close()
    os.close(printed)
    _Supervisor(run, worker, control, output, start, socket.socket(fileno=channel), ours).serve()


class _Supervisor:
    def __init__(
        self,
        run: int,
        worker: int,
        control: frames.Frames,
        output: int,
        start: dict[str, Any],
        channel: socket.socket,
        connection: socket.socket,
    ):
        self._run, self._worker, self._control, self._output = run, worker, control, output
        private = None if start["room"] is None else isolation.PRIVATE
        limits = start["what"], start["memory"], private
        if start.get("environment") is None:
            self._limits = Limits(*limits)
            self._relay = Relay(channel, connection, self._say_printed, self._answered)
        else:
            self._limits = EpisodeLimits(*limits, worker, self._say)
            self._relay = Relay(channel, connection, self._say_printed)
        self._children = Children(os.getpid())
        self._printed, self._new = b"", b""  # the last output, and the output not yet sent to the run
        self._status: int | None = None  # wait status of the worker, once it has exited
        os.set_blocking(output, False)

    def serve(self) -> None:
        """Serve until the worker exits or exceeds a limit, or the run asks for the end or exits."""
        if self._limits.private is None:  # in another PID namespace the PID would mean nothing to the run
            self._say({"worker": self._worker})
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._output, woken):
            poll.register(descriptor, select.POLLIN)
        breach, wanted = None, self._hear()  # a request to end may have arrived together with the settings
        while wanted and breach is None and self._status is None:
            self._relay.register(poll)
            ready = {descriptor for descriptor, _ in poll.poll(_TICK * 1000)}
            if self._output in ready and not self._read_output():
                poll.unregister(self._output)
            if woken in ready:
                os.read(woken, 1000)
            if self._control.fileno() in ready:
                wanted = self._hear()
            wanted = self._relay.turn(ready) and wanted
            self._status = reap().get(self._worker, self._status)
            breach = self._limits.breach(self._relay.started)
            wanted = wanted and os.getppid() == self._run
        self._end(breach)

    def _hear(self) -> bool:
        """Read control messages of the run. Returns False if the run asks for the end or has exited."""
        try:
            self._control.fill()
            while (message := self._control.take()) is not None:
                if "end" in message:
                    return False
        except (frames.EndOfFramesError, frames.FrameError):
            return False
        return True

    def _answered(self) -> None:
        """Kill the processes that a completion's code left behind, and send what it printed. This is called before the
        run gets the answer to the completion."""
        self._end_orphans()
        self._read_output()
        self._say_printed()

    def _end_orphans(self) -> None:
        """Kill orphaned processes that the code of a rated completion left behind."""
        if not set(self._children.now()) <= {self._worker}:
            ended = kill_below(os.getpid(), spare=frozenset({self._worker}))
            self._status = ended.get(self._worker, self._status)

    def _read_output(self) -> bool:
        try:
            portion = os.read(self._output, 2**16)
        except BlockingIOError:
            return True
        self._printed = (self._printed + portion)[-_KEPT_OUTPUT:]
        self._new = (self._new + portion)[-_KEPT_OUTPUT:]
        return bool(portion)

    def _say_with_output(self, message: dict[str, Any]) -> None:
        """Send a message to the run, with the last bytes of new output of the worker."""
        self._read_output()
        printed, self._new = self._new, b""
        self._say({**message, "new": printed.decode(errors="replace")} if printed else message)

    def _say_printed(self) -> None:
        if self._new:
            self._say_with_output({})

    def _end(self, breach: str | None) -> None:
        ended = kill_below(os.getpid())
        self._status = ended.get(self._worker, self._status)
        self._relay.drain()
        with contextlib.suppress(OSError):
            for _ in range(64):
                if not self._read_output():
                    break
        code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        self._say_with_output({"ended": code, "breach": breach, "printed": self._printed.decode(errors="replace")})

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(frames.EndOfFramesError, frames.LateError):
            self._control.send(frames.encode(message), time.monotonic() + 1.0)


if __name__ == "__main__":
    main()
    sys.stdout = sys.stderr = None
    os._exit(0)
