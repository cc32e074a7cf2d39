"""Episodes that run in the trainer's own process, with `reward_isolation: same_process`.

`SameProcessEpisodes` has the interface of `connection.Connection`, but enforces no limits.
"""

import select
from collections import deque
from collections.abc import Mapping
from typing import Any

from truestep.environments import frames
from truestep.environments.episodes import wire
from truestep.environments.episodes.instance import Instance
from truestep.environments.episodes.loading import UnusableError, load_environment, prepared
from truestep.environments.process import LostError, WorkerOptions
from truestep.environments.rewards import RewardError
from truestep.text import printable


class SameProcessEpisodes:
    """Plays all episodes in the thread of their host, one call at a time."""

    def __init__(self, options: WorkerOptions, arguments: Mapping[str, Any]):
        self._options, self._arguments = options, dict(arguments)
        self._posted: deque[bytes] = deque()
        self._episodes: dict[int, Instance] = {}
        self.is_quiet = True

    def start(self) -> dict[str, Any]:
        try:
            self._kind, self._arguments = load_environment(self._options.reward, self._arguments)
            return prepared(self._kind, self._arguments)
        except UnusableError as error:
            raise RewardError(printable(error, 1000)) from None

    def post(self, frame: bytes) -> None:
        self._posted.append(frame[frames.HEADER :])

    def exchange(self, seconds: float | None, woken: int) -> list[bytes]:
        if not self._posted:
            poll = select.poll()
            poll.register(woken, select.POLLIN)
            poll.poll(None if seconds is None else max(0.0, seconds) * 1000 + 1)
        bodies: list[bytes] = []
        self.is_quiet = not self._posted
        while self._posted:
            bodies += self._answers(*wire.untagged(self._posted.popleft()))
        return bodies

    def _answers(self, kind: bytes, number: int, rest: bytes) -> list[bytes]:
        if kind == wire.CLOSE:
            if (over := self._episodes.pop(number, None)) is not None:
                over.close()
            gone = frames.encode({"code": None, "process": None, "why": "closed"})
            return [_body(wire.GONE, number, gone)]
        if kind == wire.BEGIN:
            self._episodes[number] = Instance(self._kind, self._arguments, own_process=False)
        if (episode := self._episodes.get(number)) is None:  # the episode has ended, and the run knows it
            return []
        try:
            answer = frames.encode(episode.answer(frames.decode(rest)), wire.LARGEST_ANSWER)
        except frames.FrameError as error:
            raise LostError(f"an answer of the environment cannot be passed on: {error}") from None
        begun = [_body(wire.FORKED, number, frames.encode({}))] if kind == wire.BEGIN else []
        return [*begun, _body(wire.ANSWER, number, answer)]

    def why_killed(self, process: Any) -> str | None:
        return None

    def given_up(self, reason: str) -> LostError:
        return LostError(reason)

    def ask_to_end(self) -> None:
        """Do nothing: a call cannot be ended."""

    def end(self) -> None:
        while self._episodes:
            self._episodes.popitem()[1].close()


def _body(kind: bytes, number: int, frame: bytes) -> bytes:
    return wire.tagged(kind, number, frame[frames.HEADER :])[frames.HEADER :]
