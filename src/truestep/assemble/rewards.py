"""Makes the reward service of a run: one for sampling and evaluation where they have the same reward and options."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truestep.config.schema import Config
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import fields_of
from truestep.environments.rater import Rater, check_reward
from truestep.environments.rewards import RewardError
from truestep.ranks.group import Ranks
from truestep.ranks.processes import machine_memory, usable_cores

_GIBIBYTE = 2**30


@dataclass
class Raters:
    """The reward services of one rank, by their options. They start no process before there is something to rate."""

    say: Callable[[str], None] | None = None  # whom to tell of a reward that fails on its first completion
    made: dict[tuple[WorkerOptions, int], Rater] = field(default_factory=dict)

    def of(self, options: tuple[WorkerOptions, int]) -> Rater:
        if options not in self.made:
            self.made[options] = Rater(*options, self.say)
        return self.made[options]


def sampler_rewards(config: Config, ranks: Ranks) -> tuple[WorkerOptions, int] | None:
    """Give the options and the number of the workers that rate what is sampled."""
    sampler = config.sampler
    if sampler is None:
        return None
    return _rewards(
        "sampler",
        sampler.reward,
        sampler.reward_timeout,
        sampler.reward_workers,
        sampler.reward_memory,
        sampler.reward_environment,
        ranks,
    )


def evaluation_rewards(config: Config, ranks: Ranks) -> tuple[WorkerOptions, int] | None:
    """Give the options and the number of the workers that rate evaluations."""
    evaluation, sampler = config.evaluation, config.sampler
    if evaluation is None or evaluation.prompts is None:
        return None
    reward = evaluation.reward or (sampler and sampler.reward)
    assert reward, "a contradiction that the configuration refuses"
    given = (
        evaluation.reward_timeout or (sampler.reward_timeout if sampler else 60.0),
        evaluation.reward_workers or (sampler.reward_workers if sampler else None),
        evaluation.reward_memory or (sampler.reward_memory if sampler else None),
        evaluation.reward_environment
        if evaluation.reward_environment is not None
        else (sampler.reward_environment if sampler else None),
    )
    shared = sampler is not None and (reward, *given) == (
        sampler.reward,
        sampler.reward_timeout,
        sampler.reward_workers,
        sampler.reward_memory,
        sampler.reward_environment,
    )
    return _rewards("sampler" if shared else "evaluation", reward, *given, ranks)


def _rewards(
    section: str,
    reward: str,
    timeout: float,
    workers: int | None,
    memory: float | None,
    environment: Sequence[str] | None,
    ranks: Ranks,
) -> tuple[WorkerOptions, int]:
    beside = ranks_of_machine(ranks)
    count = workers or max(1, usable_cores() // beside)
    size = int(memory * _GIBIBYTE) if memory else max(_GIBIBYTE, machine_memory() // 2 // (count * beside))
    return WorkerOptions(reward, timeout, size, tuple(environment or ()), section), count


def check_rewards(config: Config, ranks: Ranks) -> None:
    """Refuse rewards that cannot be imported, and variables that are not there, before the model is loaded."""
    sections = (
        (config.sampler, sampler_rewards(config, ranks)),
        (config.evaluation, evaluation_rewards(config, ranks)),
    )
    prompts: dict[tuple[WorkerOptions, int], list[str]] = {}
    for section, found in sections:
        if section is not None and found is not None:
            prompts.setdefault(found, []).extend([section.prompts] if section.prompts else [])
    for (options, _), files in prompts.items():
        for name in options.environment:
            if name not in os.environ:
                raise RewardError(f"{options.section}.reward_environment: the environment has no variable {name}")

        def check(options: WorkerOptions = options, files: Sequence[str] = files) -> None:
            check_reward(options, [fields for file in files for fields in fields_of(file)])

        ranks.share(check)


def ranks_of_machine(ranks: Ranks) -> int:
    """Count the ranks that share this machine, as the launcher says."""
    return min(ranks.size, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))
