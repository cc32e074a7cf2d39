"""Makes the reward services of a run. Sampling and evaluation share one if their reward and options are the same."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from truestep.config import held
from truestep.config.schema import Config, makes_held_out_prompts, of_sets
from truestep.config.sections import DatasetPrompts, EvaluationConfig, SamplerBase, files_of
from truestep.environments.adapters import ADAPTERS, ASKING
from truestep.environments.episodes import program
from truestep.environments.episodes.service import EpisodeService, check_environment
from truestep.environments.printed import PrintedLog
from truestep.environments.process import SAME_PROCESS, WorkerOptions, isolation_refused
from truestep.environments.prompts import fields_of
from truestep.environments.rater import Rater, check_reward
from truestep.environments.rewards import RewardError
from truestep.generate.command import CommandPlay
from truestep.generate.environment import EnvironmentPlay
from truestep.generate.play import EpisodeLimits, Plays, SingleTurn
from truestep.generate.read import reader
from truestep.model.policy import Policy
from truestep.ranks.group import Ranks
from truestep.ranks.processes import machine_memory, usable_cores

_GIBIBYTE = 2**30
_LONGEST_STEP = 10.0  # seconds of one wait for the end of an episode that sends requests to the endpoint


@dataclass
class Raters:
    """The reward services of one rank, by their options. They start processes when the first completion is rated."""

    say: Callable[[str], None] | None = None  # shows a message if a reward fails on its first completion
    printed: PrintedLog | None = None  # keeps the output that rewards print
    made: dict[tuple[WorkerOptions, int, str], Rater | EpisodeService] = field(default_factory=dict)
    sampled_from: set[str] = field(default_factory=set)  # prompts that the environment made for sampling, as JSON

    def of(self, options: tuple[WorkerOptions, int]) -> Rater:
        made = self.made.setdefault((*options, ""), Rater(*options, self.say, self.printed))
        assert isinstance(made, Rater)
        return made

    def environments_of(self, options: tuple[WorkerOptions, int], arguments: dict[str, Any]) -> EpisodeService:
        new = EpisodeService(*options, arguments, self.say, self.printed)
        made = self.made.setdefault((*options, _written(arguments)), new)
        assert isinstance(made, EpisodeService)
        return made

    def close(self) -> None:
        for service in self.made.values():
            if isinstance(service, EpisodeService):
                service.close_all()
            else:
                service.close()

    @property
    def notes(self) -> list[str]:
        """A message for each service on the isolation of its reward processes."""
        return list(dict.fromkeys(_isolation_note(options) for options, *_ in self.made))


def _written(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, default=repr)


_DEFAULTS: dict[str, Any] = {  # used by an evaluation without a sampler; `_rewards` relies on the order of the keys
    "reward_timeout": 60.0,
    "reward_workers": None,
    "reward_memory": None,
    "reward_environment": None,
    "reward_isolation": "auto",
    "reward_writable": None,
    "reward_network": True,
}


def sampler_rewards(config: Config, ranks: Ranks) -> tuple[WorkerOptions, int] | None:
    """Return the options and the number of the workers that rate sampled completions."""
    sampler = config.sampler
    return None if sampler is None else _rewards("sampler", _code_of(sampler), _options_of(sampler), ranks)


def evaluation_rewards(config: Config, ranks: Ranks) -> tuple[WorkerOptions, int] | None:
    """Return the options and the number of the workers that rate evaluations."""
    evaluation, sampler = config.evaluation, config.sampler
    if evaluation is None or evaluation.path is not None:
        return None
    reward = evaluation.reward or (sampler and _code_of(sampler))
    assert reward, "a contradiction that the configuration refuses"
    others = _DEFAULTS if sampler is None else _options_of(sampler)
    given = {name: others[name] if value is None else value for name, value in _options_of(evaluation).items()}
    shared = sampler is not None and (reward, given) == (_code_of(sampler), others)
    return _rewards("sampler" if shared else "evaluation", reward, given, ranks)


def _code_of(sampler: SamplerBase) -> str:
    """Return the import path of the reward, or of the environment's class."""
    environment: Any = sampler.environment
    named = {"command": program.CLASS, **ADAPTERS}
    if environment is not None and environment.type in named:
        return named[environment.type]
    code = sampler.reward if environment is None else getattr(environment, "class")
    assert isinstance(code, str), "a contradiction that the configuration refuses"
    return code


def make_plays(config: Config, policy: Policy, raters: Raters, evaluates: bool = False) -> Plays | None:
    """Make the object that plays the episodes of sampling, or of an evaluation; None without episodes."""
    ranks, sampler = policy.weights.ranks, config.sampler
    rewards = evaluation_rewards(config, ranks) if evaluates else sampler_rewards(config, ranks)
    if rewards is None:
        return None
    environment = _environment(config, evaluates)
    if environment is None:
        return SingleTurn(raters.of(rewards), reader(policy))
    assert sampler is not None
    limits = EpisodeLimits(sampler.max_turns, sampler.max_episode_tokens, sampler.episode_timeout)
    service = raters.environments_of(rewards, _arguments(environment))
    if environment.type == "command" or environment.type in ASKING:
        return CommandPlay(
            service,
            policy.tokenizer,
            limits,
            stops_by_text=sampler.type == "in_process",
            say=raters.say or (lambda _: None),
            longest_step=min(_LONGEST_STEP, rewards[0].timeout / 2),
        )
    return EnvironmentPlay(service, policy.tokenizer, limits)


def _arguments(environment: Any) -> dict[str, Any]:
    """Return the arguments of the environment's class."""
    if environment.type != "command":
        return environment.options or {}
    run = shlex.split(environment.run) if isinstance(environment.run, str) else environment.run
    return {"run": run} if environment.preload is None else {"run": run, "preload": environment.preload}


def made_rows(config: Config, ranks: Ranks, raters: Raters, evaluates: bool = False) -> list[dict[str, Any]] | None:
    """Return the records of prompts that the environment makes itself, for sampling or for an evaluation; None if
    prompts are in a file. Rank 0 calls the environment, and all ranks get the records. An evaluation leaves out prompts
    that sampling uses."""
    sampler = config.sampler
    makes = makes_held_out_prompts(config) if evaluates else sampler is not None and sampler.prompts is None
    if not makes:
        return None
    rewards, environment = sampler_rewards(config, ranks), _environment(config, False)
    assert rewards is not None and environment is not None
    service = raters.environments_of(rewards, _arguments(environment))
    rows = ranks.share(lambda: list(service.rows(str(config.seed), evaluates)))
    if not evaluates:
        raters.sampled_from = {json.dumps(row["prompt"]) for row in rows}
        return rows
    held_out = [row for row in rows if json.dumps(row["prompt"]) not in raters.sampled_from]
    if not held_out:
        raise RewardError("sampler.environment: each prompt that it makes for evaluation is one that it trains on")
    return held_out


def longest_conversation(sampler: SamplerBase | None) -> int:
    """Return the most tokens of an episode of several turns, for which the engine reserves room; 0 for one turn."""
    return 0 if sampler is None or sampler.environment is None else sampler.max_episode_tokens


def _environment(config: Config, evaluates: bool) -> Any:
    """Return the environment's section. An evaluation with a reward of its own has none."""
    has_reward = evaluates and config.evaluation is not None and config.evaluation.reward is not None
    return None if config.sampler is None or has_reward else config.sampler.environment


def _options_of(section: SamplerBase | EvaluationConfig) -> dict[str, Any]:
    return {name: getattr(section, name) for name in _DEFAULTS}


def _rewards(section: str, reward: str, given: dict[str, Any], ranks: Ranks) -> tuple[WorkerOptions, int]:
    timeout, workers, memory, environment, isolation, writable, network = given.values()
    beside = ranks_of_machine(ranks)
    same_process = isolation == SAME_PROCESS
    count = workers or (1 if same_process else max(1, usable_cores() // beside))
    size = int(memory * _GIBIBYTE) if memory else max(_GIBIBYTE, machine_memory() // 2 // (count * beside))
    places = tuple(os.path.abspath(os.path.expanduser(place)) for place in writable or ())
    variables, objects = tuple(environment or ()), {} if same_process else held.packed([reward])
    return WorkerOptions(reward, timeout, size, variables, section, isolation, places, network, objects), count


@dataclass
class _Checked:
    """Worker options that are checked once, with all environments and prompt files that use them."""

    fields: list[str | DatasetPrompts] = field(default_factory=list)  # the files whose fields a reward gets
    environments: dict[str, tuple[dict[str, Any], list[bool]]] = field(default_factory=dict)
    """By their arguments: the arguments, and whether prompts that the environment makes are held out."""


def check_rewards(config: Config, ranks: Ranks) -> None:
    """Raise if a reward cannot be imported or an environment variable is missing, before the model is loaded."""
    found: dict[tuple[WorkerOptions, int], _Checked] = {}
    uses = [(config, False), *((alone, True) for alone in of_sets(config).values())]
    for given, evaluates in uses:
        section = given.evaluation if evaluates else given.sampler
        rewards = evaluation_rewards(given, ranks) if evaluates else sampler_rewards(given, ranks)
        if section is None or rewards is None:
            continue
        checked, environment = found.setdefault(rewards, _Checked()), _environment(given, evaluates)
        checked.fields.extend(files_of(section.prompts).values())
        if environment is not None:
            arguments = _arguments(environment)
            made = checked.environments.setdefault(_written(arguments), (arguments, []))[1]
            made.extend([evaluates] if section.prompts is None else [])
    for (options, _), checked in found.items():
        for name in options.environment:
            if name not in os.environ:
                raise RewardError(
                    f"{options.section}.reward_environment names {name}, and there is no such environment variable: "
                    "export it before the start, or take it from the list"
                )
        _check_isolation(options)
        ranks.share(partial(_check_calls, options, checked, str(config.seed)))


def _check_calls(options: WorkerOptions, checked: _Checked, seed: str) -> None:
    for arguments, held_out in checked.environments.values():
        check_environment(options, arguments, held_out, seed)
    if not checked.environments:
        check_reward(options, [fields for file in checked.fields for fields in fields_of(file)])


def _check_isolation(options: WorkerOptions) -> None:
    if options.isolation == SAME_PROCESS:
        return
    for place in options.writable:
        if not os.path.isdir(place):
            raise RewardError(f"{options.section}.reward_writable: {place} is not a directory: make it first")
    why = "it is switched off" if options.isolation == "off" else isolation_refused()
    if why is None:
        return
    if options.isolation == "require":
        raise RewardError(f"{options.section}.reward_isolation: require: rewards cannot be isolated here: {why}")
    if not options.network:
        raise RewardError(f"{options.section}.reward_network: false needs isolation: {why}")


def _isolation_note(options: WorkerOptions) -> str:
    if options.isolation == SAME_PROCESS:
        return (
            f"rewards: in the trainer's own process ({options.section}.reward_isolation: {SAME_PROCESS}): without "
            "limits of time and memory, and with access to this run"
        )
    if options.room is None:
        why = f"{options.section}.reward_isolation: off" if options.isolation == "off" else isolation_refused()
        return f"rewards: not isolated ({why}): code that they run can do what you can, to this run as well"
    own = " and ".join(["a /tmp in memory", *options.writable])
    network = "can use the network" if options.network else "have no network"
    return (
        f"rewards: isolated: they can read your files, write only to {own}, {network}, and see none of your processes"
    )


def ranks_of_machine(ranks: Ranks) -> int:
    """Return the number of ranks on this machine, from the launcher's LOCAL_WORLD_SIZE."""
    return min(ranks.size, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))
