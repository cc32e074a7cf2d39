"""The run's side of environments: it begins, steps and ends episodes, in processes that may die.

Methods return futures and may be called from any thread. A failure of an environment is an EpisodeError of one episode.
When an episode has its reward or has failed, its process and all descendants of that are killed. Cancelling a future
closes its episode.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from truestep.environments.episodes.connection import Connection
from truestep.environments.episodes.environment import Answer, End, ToolCall
from truestep.environments.episodes.host import Call, Episode, EpisodeError, Host, LateEpisodeError, Said, settle
from truestep.environments.episodes.made_rows import MOST_ROWS, Rows
from truestep.environments.episodes.same_process import SameProcessEpisodes
from truestep.environments.printed import PrintedLog
from truestep.environments.process import SAME_PROCESS, WorkerOptions
from truestep.environments.rater import FailingRewardError, FirstOnes, explain_failing
from truestep.environments.rewards import Rating, RewardError

__all__ = [
    "Begun",
    "Episode",
    "EpisodeError",
    "EpisodeService",
    "FailingRewardError",
    "LateEpisodeError",
    "Said",
    "check_environment",
]

_FULL = 64  # episodes of one process; with more, another process is started
_JOIN_SECONDS = 30.0
# A malformed call has more fields, which only the run uses.
_OF_CALLS = frozenset(field.name for field in fields(ToolCall))


@dataclass(frozen=True)
class Begun:
    """An episode that has begun."""

    episode: Episode
    said: Said


class EpisodeService:
    """Up to `workers` processes that each fork a process for each of their episodes."""

    def __init__(
        self,
        options: WorkerOptions,
        workers: int,
        arguments: Mapping[str, Any] | None = None,
        say: Callable[[str], None] | None = None,
        printed: PrintedLog | None = None,
    ):
        """`options.reward` is the environment's class, `arguments` are its options. `say` is called if the first
        episode fails; `printed` keeps what environments print."""
        self._options, self._most, self._arguments = options, workers, dict(arguments or {})
        self._say, self._printed = say, printed
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._names = itertools.count()
        self._hosts: list[Host] = []
        self._closed = False
        self._tools: Future[dict[str, Any]] = Future()
        self._first_ones = FirstOnes("episode", "a policy that fails gets 0")
        self._num_first = FirstOnes.most  # how many more episodes count among the run's first
        self._judged: set[int] = set()  # the numbers of episodes with an outcome

    # ---- calls

    def begin(self, row: Mapping[str, Any], seed: str, name: str | None = None) -> "Future[Begun]":
        """Begin an episode with a prompt's record. `seed` seeds its random numbers. Lines that it prints are logged
        with its `name`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the environments are closed")
            is_first = self._num_first > 0
            self._num_first -= is_first
        episode = Episode(next(self._numbers), is_first)
        begun: Future[Begun] = Future()
        started = self._call(Call(episode, "start", {"row": dict(row), "seed": seed, "name": name}, begins=True))
        begun.add_done_callback(lambda future: started.cancel() if future.cancelled() else None)
        started.add_done_callback(partial(_pass_on, episode, begun))
        return begun

    def step(self, episode: Episode, answer: Answer) -> "Future[Said | End]":
        """Pass the policy's answer to an episode. The `reward` of an End is a Rating."""
        calls = [
            {name: value for name, value in asdict(call).items() if name in _OF_CALLS} for call in answer.tool_calls
        ]
        given = asdict(answer) | {"tool_calls": calls}
        return self._call(Call(episode, "step", {"answer": given}))

    def cut(self, episode: Episode, reason: str) -> "Future[Rating]":
        """End an episode at a limit, before its environment ends it."""
        return self._call(Call(episode, "cut", {"reason": reason}))

    def close(self, episode: Episode) -> None:
        """End an episode without a reward. Does not wait; a call that is not answered is cancelled."""
        if episode.host is not None:
            episode.host.post(episode, None)

    def _call(self, call: Call) -> "Future[Any]":
        call.future.add_done_callback(lambda future: self.close(call.episode) if future.cancelled() else None)
        try:
            call.encode()
        except EpisodeError as error:
            self.close(call.episode)
            settle(call, self.judge(call.episode, error))
            return call.future
        if not call.begins:
            if call.episode.host is None or not call.episode.host.post(call.episode, call):
                settle(call, EpisodeError(call.episode.over or "the episode's process is lost"))
            return call.future
        while True:
            call.episode.host = host = self._next_host()
            if host.post(call.episode, call):
                return call.future

    def tools(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the environment is imported, and return the schemas of its tools by name. Raises
        FailingRewardError if the import fails."""
        self._next_host()
        return self._tools.result(timeout)

    def rows(self, seed: str, held_out: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the records of prompts that the environment makes itself, in a separate process. `seed` seeds its
        random numbers. Raises EpisodeError, also if there are no records."""
        which = "for evaluation" if held_out else "for training"
        episode, count = Episode(next(self._numbers)), 0
        try:
            part = None
            while part is None or not part.is_last:
                request = {"seed": seed, "held_out": held_out}
                part = self._call(Call(episode, "rows", request, begins=part is None)).result()
                assert isinstance(part, Rows)
                count += len(part.rows)
                if count > MOST_ROWS:
                    raise EpisodeError(f"the environment makes more than {MOST_ROWS:,} rows: `rows` must end")
                if part.is_none or (part.is_last and not count):
                    raise EpisodeError(f"the environment makes no prompts {which}: its `rows` gives none")
                yield from part.rows
        finally:
            self.close(episode)

    def close_all(self) -> None:
        """End all processes, and cancel all unanswered calls."""
        with self._lock:
            self._closed = True
            hosts = list(self._hosts)
        for host in hosts:
            host.stop()
        for host in hosts:
            host.thread.join(_JOIN_SECONDS)
        if not self._tools.done():
            self._tools.cancel()

    def _next_host(self) -> Host:
        """Return the process with the fewest episodes, or a new one if all are full."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the environments are closed")
            self._hosts = [host for host in self._hosts if host.thread.is_alive()]
            usable = [host for host in self._hosts if not host.is_lost]
            least = min(usable, key=lambda host: host.load, default=None)
            if least is not None and (least.load < _FULL or len(usable) >= self._most):
                return least
            name = f"episodes-{next(self._names)}"
            printed = None if self._printed is None else partial(self._printed.add, name)
            connect: Callable[[], Connection | SameProcessEpisodes] = partial(
                Connection, self._options, self._arguments, printed
            )
            if self._options.isolation == SAME_PROCESS:
                connect = partial(SameProcessEpisodes, self._options, self._arguments)
            made = Host(name, self._options.timeout, self._options.section, connect, self)
            self._hosts.append(made)
            return made

    # ---- called by hosts, from their threads

    def imported(self, tools: dict[str, Any]) -> None:
        with self._lock:
            if not self._tools.done():
                self._tools.set_result(tools)

    def not_imported(self, error: Exception) -> BaseException:
        """Return the error for waiting episodes. It ends the run, unless the environment was imported before."""
        with self._lock:
            if self._tools.done() and not self._tools.cancelled() and self._tools.exception() is None:
                return EpisodeError(str(error))
            trace = getattr(error, "traceback", None)
            failing = FailingRewardError(f"{error}" if trace is None else f"{error}\n{trace}")
            if not self._tools.done():
                self._tools.set_exception(failing)
            return failing

    def judge(self, episode: Episode, outcome: Any) -> Any:
        """Return the outcome of a call. If all of the run's first episodes fail for the same reason, return a
        FailingRewardError, which ends the run."""
        if isinstance(outcome, Rating | End):
            self._judged.add(episode.number)
            rating = outcome.reward if isinstance(outcome, End) else outcome
            self._first_ones.judge(rating if isinstance(rating, Rating) else Rating(0.0))
            self._say = None
        if not isinstance(outcome, EpisodeError):
            return outcome
        with self._lock:
            if not episode.is_first or episode.number in self._judged:
                return outcome
            self._judged.add(episode.number)
            say, self._say = self._say, None
        if say is not None:
            say(explain_failing(outcome, "episode"))
        return self._first_ones.judge(outcome)

    def left(self, episode: Episode) -> None:
        """Let another episode count among the run's first if this one was closed without an outcome."""
        with self._lock:
            self._num_first += episode.is_first and episode.number not in self._judged


def _pass_on(episode: Episode, begun: "Future[Begun]", started: "Future[Said]") -> None:
    """Settle the future of `begin` with the outcome of the call of `start`."""
    if started.cancelled():
        begun.cancel()
    if not begun.set_running_or_notify_cancel():
        return
    error = started.exception()
    if error is not None:
        begun.set_exception(error)
    else:
        begun.set_result(Begun(episode, started.result()))


def check_environment(
    options: WorkerOptions,
    arguments: Mapping[str, Any] | None = None,
    makes_rows: Sequence[bool] = (),
    seed: str = "",
) -> dict[str, Any]:
    """Import an environment in a separate process, let it make its first rows of prompts, and return the schemas of its
    tools. `makes_rows` has an entry for each set of rows that it has to make: False for training, True for held-out
    rows. Raises RewardError.
    """
    service = EpisodeService(options, 1, arguments)
    try:
        tools = service.tools()
        for held_out in makes_rows:
            next(service.rows(seed, held_out))
    except FailingRewardError as error:
        raise RewardError(str(error)) from None
    finally:
        service.close_all()
    return tools
