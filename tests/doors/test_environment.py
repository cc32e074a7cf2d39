"""Recipe: an environment is a file of prompts and a reward outside `src`, named in the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doors import own_environment
from small_runs import quiet_trainer, read_lines, sampled_config, word_model, write_lines
from truestep.environments.rewards import RewardError


def config(folder: Path, **sections: Any) -> Any:
    prompts = write_lines(folder / "prompts.jsonl", own_environment.prompts())
    sampler = {"reward": "doors.own_environment:reward"}
    return sampled_config(word_model(folder / "model"), prompts, folder / "run", **{"sampler": sampler, **sections})


def test_training_and_evaluation_use_it_and_the_policy_learns_it(tmp_path: Path) -> None:
    evaluation = {
        "prompts": str(tmp_path / "prompts.jsonl"),
        "every": 30,
        "reward": "doors.own_environment:strict_reward",
    }
    schedule = {"docs_per_step": 32, "steps": 30}
    given = config(tmp_path, evaluation=evaluation, schedule=schedule, data={"group_size": 16}, seed=3)
    trainer = quiet_trainer(given)
    trainer.run()
    rewards = [line["reward"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(rewards) == 30 and all(0 <= value <= 1 for value in rewards)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    first, last = read_lines(tmp_path / "run" / "evaluation.jsonl")
    wanted = {record["prompt"]: record["wanted"] for record in own_environment.prompts()}
    for line in (first, last):
        assert line["num_prompts"] == 2 and line["num_unrated"] == 0
        for example in line["examples"]:
            prompt, completion = example["prompt"], example["completion"]
            assert example["reward"] == own_environment.strict_reward(prompt, completion, wanted=wanted[prompt])


def test_the_reward_of_training_is_the_evaluations_where_it_has_none(tmp_path: Path) -> None:
    given = config(tmp_path, evaluation={"prompts": str(tmp_path / "prompts.jsonl"), "every": 2})
    quiet_trainer(given).run()
    wanted = {record["prompt"]: record["wanted"] for record in own_environment.prompts()}
    for line in read_lines(tmp_path / "run" / "evaluation.jsonl"):
        for example in line["examples"]:
            prompt, completion = example["prompt"], example["completion"]
            assert example["reward"] == own_environment.reward(prompt, completion, wanted=wanted[prompt])


def test_a_reward_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = config(tmp_path, sampler={"reward": "doors.own_environment:rewart"})
    with pytest.raises(RewardError, match="has no function rewart"):
        quiet_trainer(given)
