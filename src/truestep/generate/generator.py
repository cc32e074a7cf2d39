"""The interface through which everything asks for completions, and its types.

A `Generator` completes one request at a time, whenever it comes: the engine in process, inference servers, or an
OpenAI-compatible URL. Sources, evaluation and `parity` use it and do not know which one it is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class DrawOptions:
    """How tokens are drawn, and where a completion ends."""

    temperature: float  # 0: greedy
    max_new_tokens: int
    stop_ids: frozenset[int]
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    stop: tuple[str, ...] = ()  # texts that end a completion

    @property
    def truncates(self) -> bool:
        """True if some tokens of the vocabulary cannot be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Request:
    """Example: Request((15, 7, 2), options, seed=(0, 1, 12, 3), session="conversation 12")."""

    token_ids: tuple[int, ...]
    options: DrawOptions
    seed: tuple[int, ...] = ()  # the completion's draws depend only on this; servers use their own seeds
    session: str | None = None  # a conversation: its requests go to the server whose cache has its tokens

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt and of the longest completion."""
        return len(self.token_ids) + self.options.max_new_tokens


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # log-prob of each token at the request's temperature, given the tokens before it
    stopped: bool  # a stop token or a stop text ended it, not the length limit
    truncated_logprobs: list[float] | None = None  # after top_p, top_k and min_p; None: none of them is used
    versions: Sequence[int] = ()  # versions of the weights that drew each token
    server: str | None = None  # URL of the server that drew it; None: drawn in process
    aborted: bool = False  # a server gave it up because of new weights: it has no tokens and is requested again
    # [tokens, layers that route, k] the experts of the prompt's and the completion's tokens. The last token has none,
    # because the model did not process it. None: unknown.
    routes: np.ndarray | None = field(default=None, compare=False)
    # The answer of a server, which a later probe confirms or makes void.
    answer: Any = field(default=None, compare=False)


OnTokens = Callable[[Sequence[int]], None]  # called with the tokens drawn since its last call


class Generate(Protocol):
    """Completes a request."""

    def __call__(self, request: Request, on_tokens: OnTokens | None = None) -> Awaitable[Completion]:
        """Return the completion. `on_tokens` streams its tokens. If the caller is cancelled, so is the request."""
        ...


class Generator(Protocol):
    """Something that completes requests with weights of a known version."""

    @property
    def generate(self) -> Generate: ...

    def weights(self, version: int) -> None:
        """Set the version of the weights for later completions. Called on all ranks before their first request, and
        after each update. Nothing that was computed with older weights is used again."""
        ...

    def map(
        self,
        items: Sequence[T],
        work: Callable[[T, Generate], Coroutine[Any, Any, R]],
        asked_to_stop: Callable[[], bool],
    ) -> list[R]:
        """Run `work` for all items at once, each on one of the ranks, and return all results on every rank, in order.

        All ranks call this together. `work` awaits completions from the function that it is given, and whatever else it
        needs. If a rank is asked to stop while nothing is computed, all ranks raise `Interrupted`.
        """
        ...


def pass_on(done: "asyncio.Task[T]", future: "Future[T]") -> None:
    """Settle a future of another thread with the outcome of a task. The future may have been cancelled."""
    if done.cancelled():
        future.cancel()
        return
    error = done.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def completing(
    done: Callable[[int, Completion], None],
) -> Callable[[tuple[int, Request], Generate], Coroutine[Any, Any, Completion]]:
    """Return a coroutine function that completes a numbered request and then calls `done`."""

    async def work(item: tuple[int, Request], generate: Generate) -> Completion:
        number, request = item
        completion = await generate(request)
        done(number, completion)
        return completion

    return work


async def run_all(works: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """Run coroutines at once and return their results in order. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
