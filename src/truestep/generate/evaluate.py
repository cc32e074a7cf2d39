"""Evaluation on held-out prompts: greedy and sampled completions, and their rewards."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import DrawOptions, Generate, Generator
from truestep.generate.play import Episode, Played, Plays
from truestep.rollouts.source import never
from truestep.types import Rollout

_EVALUATION_DRAWS = 2  # a random stream of its own, so that evaluation does not change the draws of training


@dataclass(frozen=True)
class Evaluator:
    generator: Generator
    prompts: Sequence[Prompt]
    plays: Plays
    options: DrawOptions  # sampling options of the sampled completions
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
            **_by_source(greedy_reward=greedy, sampled_reward=sampled),
            **measured,
            "num_unrated": len(problems),
            "problems": list(dict.fromkeys(problems))[:3],
            "seconds": time.perf_counter() - start,
            "examples": greedy[: self.examples],
        }

    def close(self) -> None:
        self.plays.close()

    def _answer(
        self,
        options: DrawOptions,
        samples: int,
        step: int,
        documents_seen: int,
        asked_to_stop: Callable[[], bool],
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        prompts = [prompt for prompt in self.prompts for _ in range(samples)]
        episodes = [
            Episode(prompt, options, (self.seed, _EVALUATION_DRAWS, step, number), f"evaluation {number}")
            for number, prompt in enumerate(prompts)
        ]
        self.generator.weights(documents_seen)
        done = self.generator.map(episodes, self._play, asked_to_stop)
        if self.compare is not None and options.temperature > 0:
            named = [(f"{prompt.id} {number}", prompt) for number, prompt in enumerate(prompts)]
            drawn = [
                played.document(name, prompt, options.temperature)
                for (name, prompt), played in zip(named, done, strict=True)
                if played.num_drawn
            ]
            self.compare(drawn, documents_seen)
        measured = {
            "response_length": statistics.fmean(played.num_drawn for played in done),
            "truncated_fraction": statistics.fmean(played.truncated for played in done),
        }
        return [_answered(prompt, played) for prompt, played in zip(prompts, done, strict=True)], measured

    async def _play(self, episode: Episode, generate: Generate) -> Played:
        try:
            return await self.plays.play(episode, generate)
        except BadAnswerError as error:
            return Played((), (), "", RewardError(f"the server's answer is bad: {error}"), truncated=True)

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


def _answered(prompt: Prompt, played: Played) -> dict[str, Any]:
    """Return an episode's entry in evaluation.jsonl. A reward that failed is noted and does not end the run."""
    answer: dict[str, Any] = {"prompt": prompt.prompt, "completion": played.text}
    if prompt.source:
        answer["source"] = prompt.source
    if isinstance(played.rating, RewardError):
        return {**answer, "reward": None, "problem": str(played.rating)}
    return {**answer, "reward": float(played.rating)}


def _by_source(**answers: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the mean rewards of each source, if the prompts come from several sources."""
    names = dict.fromkeys(answer["source"] for each in answers.values() for answer in each if "source" in answer)
    return {
        f"{metric}/{name}": _mean([answer for answer in each if answer["source"] == name])
        for metric, each in answers.items()
        for name in names
    }


def _rewards(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [answer["reward"] for answer in answers if answer["reward"] is not None]


def _mean(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = _rewards(answers)
    return sum(rated) / len(rated) if rated else None


def _spread(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = _rewards(answers)
    return statistics.stdev(rated) if len(rated) > 1 else None
