"""Evaluation: held-out prompts, answered greedily and by sampling."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Reward, RewardError, rate
from truestep.policy.policy import Policy
from truestep.randomness import random_state_kept
from truestep.sampler.decode import DecodeOptions, Request, decode
from truestep.sampler.in_process import completion_text

_EVALUATION_DRAWS = 2  # a stream of randomness of its own: training draws the same with and without evaluation


@dataclass(frozen=True)
class Evaluator:
    policy: Policy
    prompts: Sequence[Prompt]
    reward: Reward
    options: DecodeOptions  # of the sampled completions
    samples_per_prompt: int
    seed: int
    examples: int = 8

    def run(self, step: int, documents_seen: int) -> dict[str, Any]:
        """Evaluate the policy and give one line of evaluation.jsonl."""
        start = time.perf_counter()
        with random_state_kept():  # a reward may draw from it: training draws the same with and without evaluation
            greedy = self._answer(dataclasses.replace(self.options, temperature=0.0), 1, step)
            sampled = self._answer(self.options, self.samples_per_prompt, step)
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

    def _answer(self, options: DecodeOptions, samples: int, step: int) -> list[dict[str, Any]]:
        prompts = [prompt for prompt in self.prompts for _ in range(samples)]
        requests = [
            Request(prompt.input_ids, (self.seed, _EVALUATION_DRAWS, step, number))
            for number, prompt in enumerate(prompts)
        ]
        texts = [completion_text(self.policy, done) for done in decode(self.policy, requests, options)]
        pairs = list(zip(prompts, texts, strict=True))
        ratings = self.policy.weights.ranks.share(lambda: [self._rate(prompt, text) for prompt, text in pairs])
        return [
            {"prompt": prompt.prompt, "completion": text, **rating}
            for (prompt, text), rating in zip(pairs, ratings, strict=True)
        ]

    def _rate(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """Ask for the reward, or say why there is none: an evaluation never ends a run."""
        try:
            return {"reward": rate(self.reward, prompt, text)}
        except RewardError as error:
            return {"reward": None, "problem": str(error)}


def _mean(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = [answer["reward"] for answer in answers if answer["reward"] is not None]
    return sum(rated) / len(rated) if rated else None
