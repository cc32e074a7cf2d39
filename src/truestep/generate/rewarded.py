"""Completions with their rewards: each is rated from the moment it ends, while others are still sampled."""

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
    """The time and tokens of sampling, added up."""

    sampling: float = 0.0  # seconds until the last completion had ended
    rating: float = 0.0  # seconds that were waited for rewards after that
    tokens: int = 0  # sampled, on all ranks
    cache_use: float = 0.0  # the largest part of its cache that this rank's engine used at a time

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
    server: str | None = None  # that made it; None: the policy itself


def decode_rated(
    policy: Policy,
    prompts: Sequence[Prompt],  # one for each request
    requests: Sequence[Request],
    options: DecodeOptions,
    rater: Rates,
    asked_to_stop: Callable[[], bool],
    spent: Spent | None = None,
) -> list[Rated]:
    """Complete requests and have each completion rated by a rank that made it; every rank gets all of them.

    What a reward draws from Python's random numbers depends on its completion's seed alone. `Interrupted` is raised on
    every rank where any of them was asked to stop while rewards were computed.
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
    """Wait for rewards; None where the run was asked to stop before the last of them came."""
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
    """Decode what a reward reads: special tokens, the end of text among them, are left out."""
    return policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
