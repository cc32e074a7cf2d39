"""Sampling with rewards: each completion is rated as soon as it ends, while others are still in flight."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.decode import Completion, DecodeOptions, Request, decode
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.rollouts.source import Interrupted

_POLL_SECONDS = 0.2  # between questions whether the run was asked to stop


@dataclass
class Spent:
    """Totals of sampling time and tokens, for the step's metrics."""

    sampling: float = 0.0  # seconds until the last completion ended
    rating: float = 0.0  # seconds of waiting for rewards after that
    tokens: int = 0  # sampled on all ranks
    cache_use: float = 0.0  # peak fraction of this rank's KV cache in use

    def measured(self) -> dict[str, float]:
        return {
            "sampling_time": self.sampling,
            "rating_time": self.rating,
            "sampled_tokens_per_second": self.tokens / self.sampling if self.sampling else 0.0,
            "sampler_cache_use": self.cache_use,
        }


@dataclass(frozen=True)
class Rated:
    """A completion, its text, and its reward or the reason why it has none."""

    completion: Completion
    text: str
    rating: Rating | RewardError
    server: str | None = None  # URL of the server that sampled it; None: sampled in process


def decode_rated(
    policy: Policy,
    prompts: Sequence[Prompt],  # one for each request
    requests: Sequence[Request],
    options: DecodeOptions,
    rater: Rates,
    asked_to_stop: Callable[[], bool],
    spent: Spent | None = None,
) -> list[Rated]:
    """Sample a completion for each request and rate it on the rank that sampled it. Return all of them on every rank.

    Random numbers in a reward function are seeded by the completion's seed. If any rank is asked to stop while it
    waits for rewards, all ranks raise `Interrupted`.
    """
    spent = spent or Spent()
    futures: dict[int, Future[Rating]] = {}
    texts: dict[int, str] = {}

    def submit(index: int, completion: Completion) -> None:
        seed = " ".join(map(str, requests[index].seed))
        texts[index] = completion_text(policy, completion)
        futures[index] = rater.submit(prompts[index], texts[index], seed)

    def used(part: float) -> None:
        spent.cache_use = max(spent.cache_use, part)

    start = time.perf_counter()
    completions = decode(policy, requests, options, submit, used)
    sampled = time.perf_counter()
    own = _wait(futures, asked_to_stop)
    spent.sampling += sampled - start
    spent.rating += time.perf_counter() - sampled
    spent.tokens += sum(len(completion.token_ids) for completion in completions)
    ratings: dict[int, Rating | RewardError] = {}
    for part in policy.weights.ranks.gather(own if own is None else (own, texts)):
        if part is None:
            raise Interrupted
        ratings |= part[0]
        texts |= part[1]
    return [Rated(completion, texts[index], ratings[index]) for index, completion in enumerate(completions)]


def _wait(
    futures: dict[int, Future[Rating]], asked_to_stop: Callable[[], bool]
) -> dict[int, Rating | RewardError] | None:
    """Wait for this rank's rewards. Return None if the run was asked to stop before all of them came."""
    pending = set(futures.values())
    unrated = sum(not future.done() for future in pending)
    with progress.waiting_for("rewards"), progress.working("rating", "rewards", unrated):
        while pending:
            pending = wait(pending, _POLL_SECONDS).not_done
            if pending and asked_to_stop():
                for future in pending:
                    future.cancel()
                return None
    return {index: _rating(future) for index, future in futures.items()}


def _rating(future: Future[Rating]) -> Rating | RewardError:
    try:
        return future.result()
    except RewardError as error:
        return error


def completion_text(policy: Policy, completion: Completion) -> str:
    """Decode a completion to the text that reward functions get: without special tokens."""
    return policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
