"""The interface of an inference server, independent of its API.

To use another kind of server, implement `InferenceServer` and name the class in `sampler.protocol`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from truestep.generate.errors import BadAnswerError, ServerError
from truestep.generate.generator import Completion, Request
from truestep.generate.servers.host_copies import HostWeights
from truestep.text import printable
from truestep.types import RouteShape


def most_tokens(request: Request, n: int) -> int:
    """Return the most tokens of an answer; some servers repeat the prompt for each completion."""
    return n * (len(request.token_ids) + request.options.max_new_tokens)


def check_size(request: Request, n: int, index: object, tokens: int) -> None:
    """Raise an error if an answer has a completion that was not requested, or more tokens than were requested."""
    if index not in range(n) or tokens > request.options.max_new_tokens:
        raise BadAnswerError(
            f"the answer has {tokens} tokens of completion {printable(index, 20)}: asked for {n} completions of at "
            f"most {request.options.max_new_tokens} tokens"
        )


@dataclass(frozen=True)
class Description:
    """A server's description of itself. None: the server does not say."""

    names: tuple[str, ...] | None = None  # the models that it serves
    longest_text: int | None = None  # tokens of a prompt and its completion
    vocabulary_size: int | None = None


@dataclass(frozen=True)
class Advice:
    """Parts of error messages about this kind of server."""

    kind: str = "an inference server"
    longer_texts: str = "let the server serve longer texts"
    processed_logprobs: str = "Let the server report log-probs after the temperature is applied"
    emptied_cache: str = "although the server was told to empty the cache"
    loaded: str = "although the server was told to load the new weights"
    routes: str = "Let the server return the experts of all tokens"


class InferenceServer(Protocol):
    """One server. It is constructed with the keywords `url`, `model`, `api_key` and `timeout`.

    Each call ends within `timeout` seconds, and fails in one of three ways. UnreachableError: no answer; the same call
    may succeed later. BadAnswerError: an answer that cannot be read. ServerError: the server refuses, and would refuse
    again.
    """

    url: str  # the server's name in messages and documents
    model: str  # the name under which it serves the model
    advice: Advice = Advice()
    # The shape of the experts that the server returns with completions (`Completion.routes`). None: experts are not
    # requested. It is set before the first request.
    routes: RouteShape | None = None
    streams_routes: bool = False  # `stream` also returns the experts

    async def describe(self) -> Description:
        """Return what is served. A paused server must answer too; otherwise it could not be distinguished from one that
        hangs."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Convert a text to tokens; None if the server has no tokenizer."""
        return None

    async def complete(self, request: Request, n: int) -> list[Completion]:
        """Sample exactly `n` completions of `request.token_ids`: only at `request.options.temperature`, without the
        model's default top_p or top_k, up to a token of `stop_ids` or `max_new_tokens`. A completion that was given up
        because of new weights is `aborted`."""
        ...

    async def stream(
        self, request: Request, n: int, on_tokens: Callable[[int, Sequence[int]], None]
    ) -> list[Completion]:
        """Like `complete`, but call `on_tokens(index, token_ids)` when tokens arrive. For `sampler.pause: keep`."""
        raise ServerError(f"sampler.pause: keep needs a server that streams, which {self.advice.kind} does not")

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        """Return the log-probs of the `count` likeliest next tokens of a prompt. `past_the_cache`: without the prefix
        cache.

        Raise ServerError if a token of the prompt is not in the vocabulary.
        """
        ...

    async def pause(self, mode: str) -> None:
        """Pause before new weights are loaded. `mode` as in `sampler.pause`: completions in flight end first (wait),
        are paused (keep) or are aborted (abort)."""
        ...

    async def link(self, device: torch.device) -> str | None:
        """Return None if the server can receive weights from this device of the trainer, else the reason. Called, like
        `send`, with `sampler.transfer: nccl`."""
        return f"{self.advice.kind} takes no weights from a trainer's device"

    async def prepare(self) -> None:
        """Prepare for new weights, while completions are in flight."""
        return

    async def load(self, weights: Path) -> None:
        """Load a Hugging Face directory into the paused server, and clear its KV cache. With `sampler.adapter: served`
        the directory has an adapter in peft's format, which is used from now on."""
        ...

    async def send(self, weights: HostWeights) -> None:
        """Send weights from the trainer's host memory to the paused server, and clear its KV cache."""
        raise ServerError(f"{self.advice.kind} takes no weights from a trainer's device")

    async def resume(self) -> None:
        """Resume after a pause. A server that was not paused does nothing."""
        ...

    async def close(self) -> None:
        """Close the connections."""
