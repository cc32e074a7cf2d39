"""The options of rewards: what sampling and evaluation get of them, and what is refused before a run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_runs import merged, sampled_config
from truestep.environments.rewards import RewardError
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import ALONE, Ranks
from truestep.run.assemble import rewards
from truestep.run.assemble.rewards import Raters, check_rewards, evaluation_rewards, sampler_rewards


def config(**sections: Any) -> Any:
    base = {"evaluation": {"prompts": "h"}, "sampler": {"reward_workers": None}}
    return sampled_config(Path("m"), Path("p.jsonl"), Path("r"), **merged(base, sections))


def test_workers_and_memory_are_this_machines_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "usable_cores", lambda: 12)
    monkeypatch.setattr(rewards, "machine_memory", lambda: 96 * 2**30)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    options, workers = sampler_rewards(config(), ALONE) or pytest.fail("there is a sampler")
    assert (workers, options.memory, options.timeout) == (12, 4 * 2**30, 60.0)
    four = Ranks(0, RankLayout(data_shard=4).over(4))
    options, workers = sampler_rewards(config(), four) or pytest.fail("there is a sampler")
    assert (workers, options.memory) == (3, 4 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (sampler_rewards(config(), four) or pytest.fail("there is a sampler"))[1] == 6
    monkeypatch.setattr(rewards, "usable_cores", lambda: 1)
    assert (sampler_rewards(config(), four) or pytest.fail("there is a sampler"))[1] == 1


def test_evaluation_shares_the_samplers_processes_where_nothing_differs() -> None:
    raters = Raters()
    given = {"reward_workers": 3, "reward_timeout": 7.0, "reward_memory": 2.0, "reward_environment": ["A"]}
    same = config(sampler=given)
    sampled, evaluated = sampler_rewards(same, ALONE), evaluation_rewards(same, ALONE)
    assert sampled is not None and evaluated is not None and raters.of(sampled) is raters.of(evaluated)
    options, workers = sampled
    assert (workers, options.timeout, options.memory, options.environment) == (3, 7.0, 2**31, ("A",))
    own = {"reward_workers": 1, "reward_timeout": 9.0, "reward_memory": 1.5, "reward_environment": []}
    other = evaluation_rewards(config(sampler=given, evaluation=own), ALONE)
    assert other is not None and raters.of(other) is not raters.of(sampled)
    options, workers = other
    assert (workers, options.timeout, options.memory, options.environment) == (1, 9.0, 3 * 2**29, ())
    assert options.section == "evaluation", "a message names the option that is at fault"


def test_a_variable_that_is_not_there_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUESTEP_NO_SUCH", raising=False)
    with pytest.raises(RewardError, match=r"sampler\.reward_environment names TRUESTEP_NO_"):
        check_rewards(config(sampler={"reward_environment": ["TRUESTEP_NO_SUCH"]}), ALONE)
