"""Evaluation: held-out prompts, answered greedily and by sampling."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.policy.policy import Policy
from truestep.rollouts.source import never
from truestep.sampler.decode import DecodeOptions, Request
from truestep.sampler.rated import Rated, decode_rated

_EVALUATION_DRAWS = 2  # a stream of randomness of its own: training draws the same with and without evaluation


class Answers(Protocol):
    def __call__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        options: DecodeOptions,
        rater: Rates,
        asked_to_stop: Callable[[], bool],
        documents_seen: int,
    ) -> list[Rated]:
        """Complete one request for each prompt, and rate the completions; every rank calls this and gets all."""
        ...


@dataclass(frozen=True)
class AnsweredHere:
    """The policy itself answers."""

    policy: Policy

    def __call__(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        options: DecodeOptions,
        rater: Rates,
        asked_to_stop: Callable[[], bool],
        documents_seen: int,
    ) -> list[Rated]:
        return decode_rated(self.policy, prompts, requests, options, rater, asked_to_stop)


@dataclass(frozen=True)
class Evaluator:
    answers: Answers
    prompts: Sequence[Prompt]
    rater: Rates
    options: DecodeOptions  # of the sampled completions
    samples_per_prompt: int
    seed: int
    examples: int = 8

    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool] = never) -> dict[str, Any]:
        """Evaluate the policy and give one line of evaluation.jsonl; `Interrupted` where the run was asked to stop."""
        start = time.perf_counter()
        greedy = self._answer(
            dataclasses.replace(self.options, temperature=0.0), 1, step, documents_seen, asked_to_stop
        )
        sampled = self._answer(self.options, self.samples_per_prompt, step, documents_seen, asked_to_stop)
        problems = [answer["problem"] for answer in (*greedy, *sampled) if "problem" in answer]
        return {
            "step": step,
            "documents_seen": documents_seen,
            "num_prompts": len(self.prompts),
            "greedy_reward": _mean(greedy),
            "sampled_reward": _mean(sampled),
            "num_unrated": len(problems),
            "problems": list(dict.fromkeys(problems))[:3],
            "seconds": time.perf_counter() - start,
            "examples": greedy[: self.examples],
        }

    def close(self) -> None:
        self.rater.close()

    def _answer(
        self,
        options: DecodeOptions,
        samples: int,
        step: int,
        documents_seen: int,
        asked_to_stop: Callable[[], bool],
    ) -> list[dict[str, Any]]:
        prompts = [prompt for prompt in self.prompts for _ in range(samples)]
        requests = [
            Request(prompt.input_ids, (self.seed, _EVALUATION_DRAWS, step, number))
            for number, prompt in enumerate(prompts)
        ]
        done = self.answers(prompts, requests, options, self.rater, asked_to_stop, documents_seen)
        return [_answered(prompt, rated) for prompt, rated in zip(prompts, done, strict=True)]


def _answered(prompt: Prompt, rated: Rated) -> dict[str, Any]:
    """Word an answer for evaluation.jsonl: its reward, or why there is none; an evaluation never ends a run."""
    answer: dict[str, Any] = {"prompt": prompt.prompt, "completion": rated.text}
    if isinstance(rated.rating, str):
        return {**answer, "reward": None, "problem": rated.rating}
    return {**answer, "reward": rated.rating}


def _mean(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = [answer["reward"] for answer in answers if answer["reward"] is not None]
    return sum(rated) / len(rated) if rated else None
