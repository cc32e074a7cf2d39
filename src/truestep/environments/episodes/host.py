"""A thread of the run that serves the episodes of one forking process: it sends their calls and settles their futures.

Each future is settled once: with an answer, or with an EpisodeError if a call takes too long, the episode's process
exits, an answer is invalid, or the forking process is lost.
"""

import contextlib
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from truestep.environments import frames
from truestep.environments.episodes import wire
from truestep.environments.episodes.answers import parts_of, said_of, turn_rewards_of
from truestep.environments.episodes.connection import Connection
from truestep.environments.episodes.environment import End, Message
from truestep.environments.episodes.made_rows import Rows, rows_from
from truestep.environments.episodes.same_process import SameProcessEpisodes
from truestep.environments.process import LostError, fit, printable_traceback
from truestep.environments.rewards import Rating, RewardError
from truestep.process import progress
from truestep.text import printable

_FORK_SECONDS = 30.0  # time to fork an episode's process, in addition to the time limit of a call
_CLOSE_SECONDS = 10.0  # time limit for killing an episode's process
_MOST_TOOLS = 1000  # the most tools in an answer whose times are kept
_GRACE = 1.0  # extra seconds for a call while answers are still being read


class EpisodeError(RewardError):
    """An error that leaves an episode without a reward."""


class LateEpisodeError(EpisodeError):
    """A call took longer than the time limit."""


@dataclass(frozen=True)
class Said:
    """An environment's message to the policy. Exactly one of these is set."""

    messages: list[Message] | None = None
    text: str | None = None
    tokens: list[int] | None = None


@dataclass(eq=False)
class Episode:
    """An episode, as a handle for the service's calls."""

    number: int
    is_first: bool = False  # one of the run's first episodes; the run ends if all of these fail for the same reason
    turns: int = 0  # the number of the policy's turns
    # Seconds of the last step's tool calls, by tool, measured by the episode's process.
    tool_seconds: dict[str, float] = field(default_factory=dict)
    over: str | None = None  # why the episode accepts no more calls; None: it accepts calls
    host: "Host | None" = field(default=None, repr=False)


@dataclass(eq=False)
class Call:
    episode: Episode
    method: str  # start, step, cut or rows; an episode may have several calls of rows
    body: Mapping[str, Any]
    future: "Future[Any]" = field(default_factory=Future)
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    begins: bool = False  # this is the episode's first call
    frame: bytes = b""
    deadline: float = math.inf
    is_forked: bool = False

    def encode(self) -> None:
        """Set the frame. Raises EpisodeError if it is too long, or if the body cannot be written as JSON."""
        what = f"what the environment's {self.method} is called with"
        try:
            frame = frames.encode({**self.body, "nonce": self.nonce, "call": self.method}, frames.LARGEST_REQUEST // 2)
        except frames.FrameError as error:
            raise EpisodeError(f"{what} is too long: {error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise EpisodeError(f"{what} cannot be written as JSON: {printable(error)}") from None
        kind = wire.BEGIN if self.begins else wire.CALL
        self.frame = wire.tagged(kind, self.episode.number, frame[frames.HEADER :])


def settle(call: Call, outcome: Any) -> None:
    """Set the result of a call's future, or its exception."""
    if call.future.set_running_or_notify_cancel():
        if isinstance(outcome, BaseException):
            call.future.set_exception(outcome)
        else:
            call.future.set_result(outcome)
    progress.made("environments")


def drop(call: Call) -> None:
    """Cancel a call's future, and wake the threads that wait for it."""
    call.future.cancel()
    call.future.set_running_or_notify_cancel()


Connected = Connection | SameProcessEpisodes


class Owner(Protocol):
    """The owner of a host, which is its service. The host's thread calls these methods."""

    def imported(self, tools: dict[str, Any]) -> None: ...

    def not_imported(self, error: Exception) -> BaseException:
        """Return the error for the episodes that wait for an environment whose import failed."""
        ...

    def judge(self, episode: Episode, outcome: Any) -> Any:
        """Return the outcome of a call, or an outcome that replaces it."""
        ...

    def left(self, episode: Episode) -> None:
        """Note an episode that was closed without an outcome."""
        ...


class Host:
    def __init__(self, name: str, timeout: float, section: str, connect: Callable[[], Connected], owner: Owner):
        """`timeout` is the time limit of a call in seconds, which is an option of the configuration's `section`."""
        self._timeout, self._section, self._connect, self._owner = timeout, section, connect, owner
        self._lock = threading.Lock()
        self._posted: deque[tuple[Episode, Call | None]] = deque()  # each episode with a call; None: close the episode
        self._woken, self._wakes = os.pipe()
        self._connection: Connected | None = None
        self._is_imported = False
        self._stopped = False
        self.is_lost = False
        self.load = 0  # the number of episodes that have begun and not ended
        self._open: dict[int, Episode] = {}
        self._calls: dict[int, Call] = {}  # by the episode's number
        # Deadlines for the exit of closed episodes' processes, by the episode's number.
        self._closing: dict[int, float] = {}
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    # ---- called from any thread

    def post(self, episode: Episode, call: Call | None) -> bool:
        """Queue a call of an episode; None closes the episode. Returns False if the process is lost."""
        with self._lock:
            if self.is_lost:
                return False
            if call is not None and call.begins:
                self.load += 1
            self._posted.append((episode, call))
            self._wake()
        return True

    def stop(self) -> None:
        """Start to end the process and all its episodes. `thread` ends when they have exited."""
        with self._lock:
            self._stopped = True
            if not self.is_lost:
                self._wake()
            connection = self._connection
        if connection is not None and not self._is_imported:
            connection.ask_to_end()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread is awake already
            os.write(self._wakes, b"x")

    # ---- called from its own thread

    def _work(self) -> None:
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)
        reason: BaseException = EpisodeError("the run ends")
        try:
            connection = self._connected()
            self._owner.imported(connection.start())
            self._is_imported = True
            self._serve(connection)
        except (LostError, RewardError) as error:
            imported = self._is_imported or self._stopped
            reason = EpisodeError(str(error)) if imported else self._owner.not_imported(error)
        except BaseException as error:  # passed on to the futures' callers
            reason = error
        self._lose(reason)
        if self._connection is not None:
            self._connection.end()

    def _connected(self) -> Connected:
        try:
            connection = self._connect()
        except OSError as error:
            raise LostError(f"no process could be started for the environment: {error}") from None
        with self._lock:
            self._connection = connection
            if self._stopped:
                raise LostError("the run ends")
        return connection

    def _lose(self, reason: BaseException) -> None:
        """Fail all calls, and accept no more."""
        with self._lock:
            self.is_lost = True
            posted = [call for _, call in self._posted if call is not None]
            self._posted.clear()
            os.close(self._woken)
            os.close(self._wakes)
        for episode in self._open.values():
            episode.over = str(reason)
        for call in [*self._calls.values(), *posted]:
            call.episode.over = call.episode.over or str(reason)
            if self._stopped:
                drop(call)
            else:
                settle(call, self._owner.judge(call.episode, reason))

    def _serve(self, connection: Connected) -> None:
        while not self._stopped:
            with self._lock:
                posted = list(self._posted)
                self._posted.clear()
            for episode, call in posted:
                if call is None:
                    self._close(connection, episode)
                else:
                    self._send(connection, call)
            bodies = connection.exchange(self._wait_at_most(), self._woken)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 2**12)
            for body in bodies:
                self._hear(connection, body)
            self._check_deadlines(connection)

    def _wait_at_most(self) -> float | None:
        """Return the seconds until the next deadline, or None without one."""
        deadlines = [*(call.deadline for call in self._calls.values()), *self._closing.values()]
        return min(deadlines) - time.monotonic() if deadlines else None

    def _send(self, connection: Connected, call: Call) -> None:
        episode = call.episode
        if call.future.cancelled():  # its episode is closed
            drop(call)
            if call.begins:
                self._forget(episode, "it was cancelled")
                self._owner.left(episode)
        elif episode.over is not None:
            settle(call, self._owner.judge(episode, EpisodeError(episode.over)))
        elif episode.number in self._calls:
            settle(call, RuntimeError(f"{call.method} was called before the last call of the episode was answered"))
        else:
            if call.begins:
                self._open[episode.number] = episode
            episode.turns += call.method == "step"
            self._calls[episode.number] = call
            call.is_forked = not call.begins
            call.deadline = time.monotonic() + self._timeout + (0.0 if call.is_forked else _FORK_SECONDS)
            connection.post(call.frame)

    def _close(self, connection: Connected, episode: Episode) -> None:
        if episode.number not in self._open:
            return
        if (call := self._calls.pop(episode.number, None)) is not None:
            drop(call)
        self._end(connection, episode, "the episode was closed")
        self._owner.left(episode)

    def _forget(self, episode: Episode, why: str) -> None:
        episode.over = why
        self._open.pop(episode.number, None)
        with self._lock:
            self.load -= 1

    def _end(self, connection: Connected, episode: Episode, why: str) -> None:
        """Ask the forking process to kill an episode's process."""
        self._forget(episode, why)
        self._closing[episode.number] = time.monotonic() + _CLOSE_SECONDS
        connection.post(wire.tagged(wire.CLOSE, episode.number))

    def _check_deadlines(self, connection: Connected) -> None:
        overdue = time.monotonic() - (0.0 if connection.is_quiet else _GRACE)
        if any(deadline < overdue for deadline in self._closing.values()):
            raise connection.given_up("the process that forks the environment's episodes did not end one of them")
        for call in [call for call in self._calls.values() if call.deadline < overdue]:
            if not call.is_forked:
                raise connection.given_up("the process that forks the environment's episodes did not begin one of them")
            limit = f"{self._section}.reward_timeout: {self._timeout:g} s"
            error = LateEpisodeError(f"the environment's {call.method} took longer than {limit}")
            del self._calls[call.episode.number]
            self._end(connection, call.episode, str(error))
            settle(call, self._owner.judge(call.episode, error))

    def _hear(self, connection: Connected, body: bytes) -> None:
        try:
            kind, number, rest = wire.untagged(body)
            if kind == wire.GONE:
                self._note_end(connection, number, frames.decode(rest))
        except frames.FrameError as error:
            raise connection.given_up(
                f"the environment wrote to the connection that carries episodes: {error}"
            ) from None
        call = self._calls.get(number)
        if kind == wire.FORKED and call is not None and not call.is_forked:
            call.is_forked = True
            call.deadline = time.monotonic() + self._timeout
        elif kind == wire.ANSWER and number in self._open:
            self._answer(connection, self._open[number], rest)

    def _note_end(self, connection: Connected, number: int, message: dict[str, Any]) -> None:
        """Handle the exit of an episode's process. The episode fails, unless it was closed."""
        self._closing.pop(number, None)
        killed = connection.why_killed(message.get("process"))
        episode = self._open.get(number)
        if episode is None:
            return
        call = self._calls.pop(number, None)
        where = "between two calls" if call is None else f"in {call.method}"
        code, why = message.get("code"), message.get("why")
        if killed is None and isinstance(why, str):
            killed = f"the environment {printable(why)}, {where}"
        if killed is None:
            how = (
                "no exit code" if not isinstance(code, int) else f"signal {-code}" if code < 0 else f"exit code {code}"
            )
            killed = f"the environment ended its process {where} ({how})"
        self._forget(episode, killed)
        if call is not None:
            settle(call, self._owner.judge(episode, EpisodeError(killed)))

    def _answer(self, connection: Connected, episode: Episode, rest: bytes) -> None:
        call = self._calls.pop(episode.number, None)
        outcome: Any = EpisodeError("the environment wrote to the connection of its process")
        if call is not None:
            with contextlib.suppress(frames.FrameError, TypeError, ValueError, KeyError, AttributeError):
                outcome = outcome_of(call, frames.decode(rest))
        if not isinstance(outcome, Said | Rows):
            self._end(
                connection, episode, str(outcome) if isinstance(outcome, EpisodeError) else "the episode has ended"
            )
        if call is not None:
            settle(call, self._owner.judge(episode, outcome))


def outcome_of(call: Call, message: dict[str, Any]) -> Said | End | Rating | Rows | EpisodeError:
    """Parse an episode's answer to a call. Raises FrameError, or another error of parsing, if it is invalid."""
    if message.pop("nonce", None) != call.nonce:
        raise frames.FrameError("not the answer to what was asked")
    if isinstance(problem := message.get("problem"), str):
        return EpisodeError(printable(problem), printable_traceback(message.get("traceback")))
    what = f"the environment's {call.method}"
    call.episode.tool_seconds = _tool_seconds(message.pop("tools", None))
    (kind, value) = next(iter(message.items()))
    try:
        if kind == "rows" and call.method == "rows":
            return rows_from(value)
        if kind == "said" and call.method in ("start", "step"):
            (said,) = value.values()
            return Said(**said_of(said, what))
        if kind == "end" and call.method in ("step", "cut"):
            return _end_from(call, value, what)
    except RewardError as error:
        return EpisodeError(printable(error))
    raise frames.FrameError("no answer")


def _tool_seconds(given: Any) -> dict[str, float]:
    """Return the seconds by tool, without invalid values."""
    found = list(given.items())[:_MOST_TOOLS] if isinstance(given, dict) else []
    return {name: value for name, value in found if type(value) is float and 0 <= value < math.inf}


def _end_from(call: Call, value: Mapping[str, Any], what: str) -> End | Rating:
    if not isinstance(value["reward"], float):
        raise frames.FrameError("a reward that is not a number")
    rating = fit(Rating.of(value["reward"], parts_of(value["parts"])), what)
    of_turns = turn_rewards_of(value["turn_rewards"], what, call.episode.turns)
    return rating if call.method == "cut" else End(rating, tuple(of_turns))
