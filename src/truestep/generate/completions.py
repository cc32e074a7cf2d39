"""Sampling options, requests to a sampler, and the completions that it returns."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeOptions:
    temperature: float  # 0: greedy
    top_p: float
    max_new_tokens: int
    batch_size: int | None  # completions in flight; None: as many as free memory allows
    stop_ids: frozenset[int]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    stop: tuple[str, ...] = ()  # texts that end a completion
    engine: bool = True  # False: static batches with transformers' own attention and cache
    exact: bool = False  # log-probs equal those of training bit by bit

    @property
    def truncates(self) -> bool:
        """True where not every token of the vocabulary can be drawn."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class Request:
    input_ids: tuple[int, ...]
    seed: tuple[int, ...]  # the completion's draws depend on this alone


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]  # the stop token included
    logprobs: list[float]  # of each, given those before it
    stopped: bool  # by a stop token or a stop text, and not by the length
    truncated_logprobs: list[float] | None = None  # after top_p, top_k and min_p; None: none of them is used


Done = Callable[[int, Completion], None]  # called with a request's number as soon as its completion ends
