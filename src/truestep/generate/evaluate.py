"""Evaluation on held-out prompts: greedy and sampled completions, and their rewards."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from truestep.environments.prompts import Prompt
from truestep.environments.rewards import RewardError
from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import DrawOptions, Generate, Generator
from truestep.generate.play import Episode, Played, Plays
from truestep.metrics.interval import half_width, half_width_of_means
from truestep.rollouts.source import never
from truestep.types import Rollout

_EXAMPLES = 8  # most examples in a line
_EVALUATION_DRAWS = 2  # a random stream of its own, so that evaluation does not change the draws of training


@dataclass(frozen=True)
class Evaluator:
    generator: Generator
    prompts: Sequence[Prompt]
    plays: Plays
    options: DrawOptions  # sampling options of the sampled completions
    samples_per_prompt: int
    seed: int
    stream: tuple[int, ...] = ()  # the stream of random numbers of one of several sets
    pass_reward: float | None = None  # least reward of a completion that passes; None: no pass@k
    examples: int = _EXAMPLES
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
            "greedy_reward": _mean(greedy, 1),
            "sampled_reward": _mean(sampled, self.samples_per_prompt),
            "greedy_reward_ci": half_width(_of_questions(greedy, 1)),
            "sampled_reward_ci": half_width(_of_questions(sampled, self.samples_per_prompt)),
            "greedy_reward_std": _spread(greedy),
            "sampled_reward_std": _spread(sampled),
            **self._passes([answer["reward"] for answer in sampled]),
            **_by_source("greedy_reward", greedy, 1),
            **_by_source("sampled_reward", sampled, self.samples_per_prompt),
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
            Episode(prompt, options, (self.seed, _EVALUATION_DRAWS, step, number, *self.stream), f"evaluation {number}")
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

    def _passes(self, rewards: Sequence[float | None]) -> dict[str, float | None]:
        """Estimate pass@k for k = 1, 2, 4, ... `rewards`: `samples_per_prompt` for each prompt, prompt after prompt."""
        if self.pass_reward is None:
            return {}
        size = self.samples_per_prompt
        counts = []
        for start in range(0, len(rewards), size):
            rated = [reward for reward in rewards[start : start + size] if reward is not None]
            counts.append((len(rated), sum(reward >= self.pass_reward for reward in rated)))
        line: dict[str, float | None] = {}
        for k in (2**power for power in range(size.bit_length())):
            if chances := pass_chances(k, counts):
                line |= {f"pass@{k}": statistics.fmean(chances), f"pass@{k}_ci": half_width(chances)}
        return line


@dataclass(frozen=True)
class EvaluatorOfSets:
    """Evaluates several sets of held-out prompts, one after another."""

    sets: Mapping[str, Evaluator]

    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool] = never) -> dict[str, Any]:
        """Evaluate the policy on each set and return a line of evaluation.jsonl. The metrics of a set begin with its
        name; rewards without a name are means over the sets."""
        lines = {name: evaluator.run(step, documents_seen, asked_to_stop) for name, evaluator in self.sets.items()}
        problems = [f"{name}: {problem}" for name, line in lines.items() for problem in line["problems"]]
        shown = max(1, _EXAMPLES // len(lines))
        return {
            "step": step,
            "documents_seen": documents_seen,
            "num_prompts": sum(line["num_prompts"] for line in lines.values()),
            **_over_sets("greedy_reward", list(lines.values())),
            **_over_sets("sampled_reward", list(lines.values())),
            **{f"{name}/{key}": line[key] for name, line in lines.items() for key in line if key not in _OF_THE_WHOLE},
            "num_unrated": sum(line["num_unrated"] for line in lines.values()),
            "problems": problems[:3],
            "seconds": sum(line["seconds"] for line in lines.values()),
            "examples": [{"set": name, **each} for name, line in lines.items() for each in line["examples"][:shown]],
        }

    def close(self) -> None:
        for evaluator in self.sets.values():
            evaluator.close()


_OF_THE_WHOLE = ("step", "documents_seen", "problems", "seconds", "examples")


def _over_sets(metric: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of the sets' means, with equal weights, and its interval. The standard deviation is the one that
    would give the same error if all prompts were one set."""
    means, spreads = [line[metric] for line in lines], [line[f"{metric}_std"] for line in lines]
    sizes = [line["num_prompts"] for line in lines]
    if None in means:
        return {metric: None, f"{metric}_ci": None, f"{metric}_std": None}
    error = None
    if None not in spreads:
        error = math.hypot(*(spread / math.sqrt(size) for spread, size in zip(spreads, sizes, strict=True))) / len(
            means
        )
    return {
        metric: statistics.fmean(means),
        f"{metric}_ci": half_width_of_means([line[f"{metric}_ci"] for line in lines]),
        f"{metric}_std": None if error is None else error * math.sqrt(sum(sizes)),
    }


def pass_chances(k: int, counts: Sequence[tuple[int, int]]) -> list[float]:
    """Return the unbiased estimate of pass@k for each prompt. `counts`: for each prompt, the number of its completions
    and how many of them pass. Prompts with fewer than k completions are left out."""
    return [1 - comb(answers - passed, k) / comb(answers, k) for answers, passed in counts if answers >= k]


def _answered(prompt: Prompt, played: Played) -> dict[str, Any]:
    """Return an episode's entry in evaluation.jsonl. A reward that failed is noted and does not end the run."""
    answer: dict[str, Any] = {"prompt": prompt.prompt, "completion": played.text}
    if prompt.source:
        answer["source"] = prompt.source
    if isinstance(played.rating, RewardError):
        return {**answer, "reward": None, "problem": str(played.rating)}
    return {**answer, "reward": float(played.rating)}


def _by_source(metric: str, answers: Sequence[dict[str, Any]], samples: int) -> dict[str, float | None]:
    """Return the mean reward of each source, if the prompts come from several sources."""
    names = dict.fromkeys(answer["source"] for answer in answers if "source" in answer)
    return {f"{metric}/{name}": _mean([one for one in answers if one["source"] == name], samples) for name in names}


def _rewards(answers: Sequence[dict[str, Any]]) -> list[float]:
    return [answer["reward"] for answer in answers if answer["reward"] is not None]


def _of_questions(answers: Sequence[dict[str, Any]], samples: int) -> list[float]:
    """Return the mean reward of each question that has a rated answer. Questions are independent, and the answers to
    one question are not, so the mean of all and its interval are made of these."""
    asked = [_rewards(answers[start : start + samples]) for start in range(0, len(answers), samples)]
    return [statistics.fmean(rewards) for rewards in asked if rewards]


def _mean(answers: Sequence[dict[str, Any]], samples: int) -> float | None:
    asked = _of_questions(answers, samples)
    return statistics.fmean(asked) if asked else None


def _spread(answers: Sequence[dict[str, Any]]) -> float | None:
    rated = _rewards(answers)
    return statistics.stdev(rated) if len(rated) > 1 else None
