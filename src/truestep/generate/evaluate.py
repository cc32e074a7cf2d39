"""Evaluation on held-out prompts: greedy and sampled completions, and their rewards."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rates
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import Completion, DrawOptions, Generate, Generator, Request
from truestep.generate.group_maker import awaited, seed_text
from truestep.generate.groups import to_rollout
from truestep.rollouts.source import never
from truestep.types import Rollout

_EVALUATION_DRAWS = 2  # a random stream of its own, so that evaluation does not change the draws of training


@dataclass(frozen=True)
class Rated:
    """A completion, its text, and its reward or the reason why it has none."""

    completion: Completion
    text: str
    rating: Rating | RewardError


@dataclass(frozen=True)
class Evaluator:
    generator: Generator
    prompts: Sequence[Prompt]
    rater: Rates
    options: DrawOptions  # of the sampled completions
    read: Callable[[Sequence[int]], str]  # decodes a completion to the text that the reward gets
    samples_per_prompt: int
    seed: int
    pass_reward: float | None = None  # least reward of a completion that passes; None: no pass@k
    examples: int = 8
    # Gets the sampled documents and `documents_seen`. Raises an error if their log-probs are not the policy's.
    compare: Callable[[Sequence[Rollout], int], None] | None = None

    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool] = never) -> dict[str, Any]:
        """Evaluate the policy and return a line of evaluation.jsonl. Raise `Interrupted` if the run is asked to
        stop."""
        start = time.perf_counter()
        at_zero = dataclasses.replace(self.options, temperature=0.0)
        greedy, _ = self._answer(at_zero, 1, step, documents_seen, asked_to_stop)
        sampled, measured = self._answer(self.options, self.samples_per_prompt, step, documents_seen, asked_to_stop)
        problems = [answer["problem"] for answer in (*greedy, *sampled) if "problem" in answer]
        return {
            "step": step,
            "documents_seen": documents_seen,
            "num_prompts": len(self.prompts),
            "greedy_reward": _mean(greedy),
            "sampled_reward": _mean(sampled),
            "greedy_reward_std": _spread(greedy),
            "sampled_reward_std": _spread(sampled),
            **self._passes([answer["reward"] for answer in sampled]),
            **measured,
            "num_unrated": len(problems),
            "problems": list(dict.fromkeys(problems))[:3],
            "seconds": time.perf_counter() - start,
            "examples": greedy[: self.examples],
        }

    def close(self) -> None:
        self.rater.close()

    def _answer(
        self,
        options: DrawOptions,
        samples: int,
        step: int,
        documents_seen: int,
        asked_to_stop: Callable[[], bool],
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        prompts = [prompt for prompt in self.prompts for _ in range(samples)]
        asked = [
            (prompt, Request(prompt.input_ids, options, (self.seed, _EVALUATION_DRAWS, step, number)))
            for number, prompt in enumerate(prompts)
        ]
        self.generator.weights(documents_seen)
        done = self.generator.map(asked, self._complete, asked_to_stop)
        if self.compare is not None and options.temperature > 0:
            self.compare(_documents(prompts, done, options.temperature, documents_seen), documents_seen)
        completions = [rated.completion for rated in done]
        measured = {
            "response_length": statistics.fmean(len(completion.token_ids) for completion in completions),
            "truncated_fraction": statistics.fmean(not completion.stopped for completion in completions),
        }
        return [_answered(prompt, rated) for prompt, rated in zip(prompts, done, strict=True)], measured

    async def _complete(self, asked: tuple[Prompt, Request], generate: Generate) -> Rated:
        prompt, request = asked
        try:
            completion = await generate(request)
        except BadAnswerError as error:
            return Rated(Completion([], [], stopped=False), "", RewardError(f"the server's answer is bad: {error}"))
        text = self.read(completion.token_ids)
        try:
            return Rated(completion, text, await awaited(self.rater)(prompt, text, seed_text(request)))
        except RewardError as error:
            return Rated(completion, text, error)

    def _passes(self, rewards: Sequence[float | None]) -> dict[str, float]:
        """Estimate pass@k for k = 1, 2, 4, ... `rewards`: `samples_per_prompt` for each prompt, prompt after prompt."""
        if self.pass_reward is None:
            return {}
        size = self.samples_per_prompt
        counts = []
        for start in range(0, len(rewards), size):
            rated = [reward for reward in rewards[start : start + size] if reward is not None]
            counts.append((len(rated), sum(reward >= self.pass_reward for reward in rated)))
        found = {2**power: pass_at(2**power, counts) for power in range(size.bit_length())}
        return {f"pass@{k}": value for k, value in found.items() if value is not None}


def pass_at(k: int, counts: Sequence[tuple[int, int]]) -> float | None:
    """Return the unbiased estimate of pass@k, the mean over prompts. `counts`: for each prompt, the number of its
    completions and how many of them pass. Prompts with fewer than k completions are left out; None: all are."""
    chances = [1 - comb(answers - passed, k) / comb(answers, k) for answers, passed in counts if answers >= k]
    return statistics.fmean(chances) if chances else None


def _documents(
    prompts: Sequence[Prompt], answers: Sequence[Rated], temperature: float, documents_seen: int
) -> list[Rollout]:
    """Make documents from completions, in the form in which they would be trained on."""
    return [
        to_rollout(
            f"{prompt.id} {number}",
            prompt,
            rated.completion.token_ids,
            rated.completion.logprobs,
            temperature=temperature,
            versions=[documents_seen] * len(rated.completion.token_ids),
            metadata={"server": rated.completion.server},
        )
        for number, (prompt, rated) in enumerate(zip(prompts, answers, strict=True))
        if rated.completion.token_ids
    ]


def _answered(prompt: Prompt, rated: Rated) -> dict[str, Any]:
    """Return a completion's entry in evaluation.jsonl. A reward that failed is noted and does not end the run."""
    answer: dict[str, Any] = {"prompt": prompt.prompt, "completion": rated.text}
    if isinstance(rated.rating, RewardError):
        return {**answer, "reward": None, "problem": str(rated.rating)}
    return {**answer, "reward": float(rated.rating)}


def _rewards(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [answer["reward"] for answer in answers if answer["reward"] is not None]


def _mean(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = _rewards(answers)
    return sum(rated) / len(rated) if rated else None


def _spread(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = _rewards(answers)
    return statistics.stdev(rated) if len(rated) > 1 else None
