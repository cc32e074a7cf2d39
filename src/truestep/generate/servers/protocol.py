"""The calls that the trainer makes of an inference server, in its own values: how they travel is the server's class's.

A class that implements `InferenceServer` is all that another kind of server takes: name it in `sampler.protocol`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from truestep.generate.servers.errors import BadAnswerError, ServerError
from truestep.generate.servers.host_copies import HostWeights
from truestep.text import printable


@dataclass(frozen=True)
class CompletionRequest:
    """One request: `n` completions of a prompt."""

    prompt: tuple[int, ...]
    n: int
    temperature: float
    max_new_tokens: int
    stop_ids: frozenset[int]
    vocabulary_size: int

    @property
    def tokens(self) -> int:
        """Count the tokens that an answer holds at most; some servers repeat the prompt beside each completion."""
        return self.n * (len(self.prompt) + self.max_new_tokens)

    def check_size(self, index: object, tokens: int) -> None:
        """Refuse a completion that was not asked for, or that has more tokens: a stream has no end of its own."""
        if index not in range(self.n) or tokens > self.max_new_tokens:
            raise BadAnswerError(
                f"the stream has {tokens} tokens of completion {printable(index, 20)}: asked for {self.n} completions "
                f"of at most {self.max_new_tokens} tokens"
            )


@dataclass(frozen=True)
class Choice:
    """One completion. An aborted one has no tokens: it is to be sampled again."""

    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # of each, given those before it, at the temperature that was asked for
    stopped: bool  # by a stop token, and not by the length
    aborted: bool = False
    versions: list[int] = field(default_factory=list)  # weights that made each token; the trainer fills them in


@dataclass(frozen=True)
class Description:
    """A server's word about itself. None: it does not say."""

    names: tuple[str, ...] | None = None  # of the models that it serves
    longest_text: int | None = None  # tokens of a prompt and its completion
    vocabulary_size: int | None = None


@dataclass(frozen=True)
class Advice:
    """Ends of messages that say what is wrong with a server: what to do about one of this kind."""

    kind: str = "an inference server"
    longer_texts: str = "let it serve longer texts"
    processed_logprobs: str = "Let it report log-probs behind the temperature"
    emptied_cache: str = "although it was told to empty it"
    loaded: str = "although it was told to load the new ones"


class InferenceServer(Protocol):
    """One server, made with its `url`, `model`, `api_key` and `timeout` by keyword.

    Each call ends within `timeout` seconds, and fails in one of three ways. UnreachableError: no answer, so that the
    same call may succeed later. BadAnswerError: an answer that nobody can read. ServerError: the server refuses, and
    would refuse again.
    """

    url: str  # its name in messages and documents
    model: str  # the name that it serves the model under
    advice: Advice = Advice()

    async def describe(self) -> Description:
        """Say what is served. It answers even while paused, or a server that hangs would never be found out."""
        ...

    async def tokenize(self, text: str) -> list[int] | None:
        """Convert a text to tokens; None where the server has no tokenizer."""
        return None

    async def complete(self, request: CompletionRequest) -> list[Choice]:
        """Sample completions: exactly `request.n`, at the temperature alone, whatever defaults the model comes with."""
        ...

    async def stream(self, request: CompletionRequest, on_tokens: Callable[[int, int], None]) -> list[Choice]:
        """Do as `complete`, and call `on_tokens(choice's index, count)` when tokens come. For `sampler.pause: keep`."""
        raise ServerError(f"sampler.pause: keep needs a server that streams, which {self.advice.kind} does not")

    async def next_token(
        self, prompt: tuple[int, ...], temperature: float, count: int, *, past_the_cache: bool = False
    ) -> dict[int, float]:
        """Give the log-probs of the likeliest `count` tokens behind a prompt. `past_the_cache`: computed anew.

        A prompt with a token that the model does not know is refused by a ServerError.
        """
        ...

    async def pause(self, mode: str) -> None:
        """Stand still before new weights. `mode` as in `sampler.pause`: completions under way end first (wait), stand
        still too (keep) or end as aborted (abort)."""
        ...

    async def link(self, device: torch.device) -> str | None:
        """Find out whether the server takes weights that are sent through this device of the trainer's; the reason
        where not. For `sampler.transfer: nccl`, as `send` is."""
        return f"{self.advice.kind} takes no weights from a trainer's device"

    async def prepare(self) -> None:
        """Get ready for new weights, while completions run."""
        return

    async def load(self, weights: Path) -> None:
        """Load a Hugging Face directory into the paused server, and forget all that the old weights computed. With
        `sampler.adapter: served` it is the directory of an adapter, in peft's format, to be used from now on."""
        ...

    async def send(self, weights: HostWeights) -> None:
        """Send weights of the trainer's host memory to the paused server, which forgets what the old ones computed."""
        raise ServerError(f"{self.advice.kind} takes no weights from a trainer's device")

    async def resume(self) -> None:
        """Go on after a pause. A server that was not paused does nothing."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
