"""A reward that is called in the trainer's own process, with `reward_isolation: same_process`.

`SameProcessWorker` has the interface of `process.Worker`, but none of its limits: an exit, a hang or a memory leak of
the user's code is one of the run. The user's objects keep their state from one call to the next.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from truestep.environments import frames
from truestep.environments.process import WorkerOptions, fit, printable_traceback
from truestep.environments.rewards import Rating, RewardError, call, check_signature, load_reward
from truestep.text import printable


class SameProcessWorker:
    """Calls a reward in the thread that asks for it."""

    def __init__(self, options: WorkerOptions):
        self._options = options
        self.num_rated = 0

    def start(self, fields: Sequence[tuple[str, Sequence[str]]] | None = None) -> None:
        self._reward = load_reward(self._options.reward)
        check_signature(self._options.reward, self._reward, fields)

    def rate(self, request: Mapping[str, Any]) -> Rating:
        given = plain(request)
        self.num_rated += 1
        try:
            return fit(call(self._reward, given["prompt"], given["completion"], given["fields"]))
        except RewardError as error:
            raise RewardError(printable(error), printable_traceback(error.traceback)) from None

    def usable(self) -> bool:
        return True

    def ask_to_end(self) -> None:
        """Do nothing: a call cannot be ended."""

    def end(self) -> None:
        """Do nothing: there is no process to end."""


def plain(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as another process would receive it: copies, which the user's code may change."""
    return frames.decode(frames.encode(dict(request))[frames.HEADER :])
