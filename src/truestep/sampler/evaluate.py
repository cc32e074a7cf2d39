"""Held-out prompts, answered greedily and sampled: what the policy can do, beside what it is trained on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Reward, RewardError, rate
from truestep.policy.policy import Policy
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
        """One line of evaluation.jsonl."""
        start = time.perf_counter()
        greedy, examples = self._answer(dataclasses.replace(self.options, temperature=0.0), 1, step)
        sampled, _ = self._answer(self.options, self.samples_per_prompt, step)
        return {
            "step": step,
            "documents_seen": documents_seen,
            "num_prompts": len(self.prompts),
            "greedy_reward": _mean(greedy),
            "sampled_reward": _mean(sampled),
            "num_unrated": sum(reward is None for reward in (*greedy, *sampled)),
            "seconds": time.perf_counter() - start,
            "examples": examples,
        }

    def _answer(
        self, options: DecodeOptions, samples: int, step: int
    ) -> tuple[list[float | None], list[dict[str, Any]]]:
        asked = [prompt for prompt in self.prompts for _ in range(samples)]
        requests = [
            Request(prompt.input_ids, (self.seed, _EVALUATION_DRAWS, step, number))
            for number, prompt in enumerate(asked)
        ]
        completions = decode(self.policy, requests, options)
        texts = [completion_text(self.policy, completion) for completion in completions]
        rewards = [self._rate(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
        examples = [
            {"prompt": prompt.prompt, "completion": text, "reward": reward}
            for prompt, text, reward in list(zip(asked, texts, rewards, strict=True))[: self.examples]
        ]
        return rewards, examples

    def _rate(self, prompt: Prompt, text: str) -> float | None:
        """None where the reward failed: an evaluation never ends a run."""
        try:
            return rate(self.reward, prompt, text)
        except RewardError:
            return None


def _mean(rewards: Sequence[float | None]) -> float | None:
    rated = [reward for reward in rewards if reward is not None]
    return sum(rated) / len(rated) if rated else None
