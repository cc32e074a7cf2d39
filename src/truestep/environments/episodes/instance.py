"""The process of one episode: when the run asks, it calls the methods of an instance of the user's class.

Imports no torch, which would make forking slow.
"""

import asyncio
import contextlib
import copy
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn

from truestep.environments import frames
from truestep.environments.episodes import environment, made_rows
from truestep.environments.episodes.answers import end_of, is_said, said_of
from truestep.environments.episodes.environment import Answer, Environment, ToolCall
from truestep.environments.episodes.loading import Kind
from truestep.environments.episodes.made_rows import RowParts
from truestep.environments.forked import adopt_orphans, die_with_parent, seed_all
from truestep.environments.printed import name_lines
from truestep.environments.rewards import RewardError, failure

_OURS = (__file__, environment.__file__, made_rows.__file__, os.path.dirname(asyncio.__file__) + os.sep)


def run_episode(channel: frames.Frames, parent: int, kind: Kind, options: Mapping[str, Any]) -> NoReturn:
    """Answer calls until the connection ends, then exit without running exit handlers."""
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        adopt_orphans()
        Instance(kind, options).serve(channel)
    except frames.EndOfFramesError:
        code = 0
    except BaseException:  # printed, because the run keeps what is printed
        import traceback  # imported late: slow to import

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


class Instance:
    """An instance of the user's class, for one episode."""

    def __init__(self, kind: Kind, options: Mapping[str, Any], own_process: bool = True):
        """`own_process`: the episode has its own process, where its random generators are seeded and printed lines get
        the episode's name."""
        self._kind, self._options, self._own_process = kind, options, own_process
        self._instance: Environment | None = None
        self._rows: RowParts | None = None
        self._turns = 0
        self._runner: asyncio.Runner | None = None  # one event loop for the whole episode

    def serve(self, channel: frames.Frames) -> None:
        while True:
            channel.send(frames.encode(self.answer(channel.receive())))

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the requested method, and return the answer."""
        try:
            answer = self._answer(request)
        except RewardError as error:
            answer = {"problem": str(error), "traceback": error.traceback}
        return {"nonce": request["nonce"], **answer}

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        method = request["call"]
        what = f"the environment's {method}"
        if method == "rows":
            return {"rows": self._called(what, lambda: self._next_rows(request))}
        if method == "start":
            self._seed(request["seed"])
            if self._own_process and request["name"] is not None:
                name_lines(f"{request['name']}: ")
            made = self._instance = self._called("the environment's __init__", lambda: self._make(request["row"]))
            return {"said": said_of(self._called(what, lambda: made.start(request["row"])), what)}
        instance = self._instance
        if instance is None:
            raise RewardError(f"{what} was called before start")
        if method == "cut":
            return {"end": end_of(self._called(what, lambda: instance.cut(request["reason"])), what, self._turns)}
        self._turns += 1
        instance.turns = self._turns
        seconds: dict[str, float] = {}
        instance._tool_seconds = seconds
        returned = self._called(what, lambda: instance.step(answer_from(request["answer"])))
        if is_said(returned):
            return {"said": said_of(returned, what), "tools": seconds}
        return {"end": end_of(returned, what, self._turns), "tools": seconds}

    def _next_rows(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._rows is None:
            self._seed(request["seed"])
            self._rows = RowParts(self._kind.rows(self._options, request["held_out"]))
        return self._rows.next()

    def _seed(self, seed: str) -> None:
        if self._own_process:  # else the trainer's random generators would change
            seed_all(seed)

    def _make(self, row: Mapping[str, Any]) -> Environment:
        kind = self._kind
        instance = copy.copy(kind) if isinstance(kind, Environment) else kind(**self._options)
        instance.row, instance.turns = row, 0
        return instance

    def _called(self, what: str, method: Callable[[], Any]) -> Any:
        """Call a user's method, and await its result if necessary. Any exception becomes a RewardError."""
        try:
            returned = method()
            if inspect.isawaitable(returned):
                self._runner = self._runner or asyncio.Runner()
                returned = self._runner.run(_awaited(returned))
        except BaseException as error:
            raise failure(error, _of_user(error.__traceback__), what) from None
        return returned


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


def _of_user(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames before the user's code."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


def answer_from(given: Mapping[str, Any]) -> Answer:
    """Read the policy's turn from a request."""
    calls = tuple(ToolCall(**call) for call in given["tool_calls"])
    return Answer(given["text"], calls, given["reasoning"], given["raw"])
