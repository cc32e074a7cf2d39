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


@pytest.mark.parametrize("own", [None, "strict_reward"], ids=["the reward of training", "a reward of its own"])
def test_training_and_evaluation_use_it(own: str | None, tmp_path: Path) -> None:
    """That a policy learns by a reward: tests/trajectory."""
    evaluation = {"prompts": str(tmp_path / "prompts.jsonl"), "every": 2}
    evaluation |= {"reward": f"doors.own_environment:{own}"} if own else {}
    quiet_trainer(config(tmp_path, evaluation=evaluation, schedule={"steps": 2})).run()
    rewards = [line["reward"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(rewards) == 2 and all(0 <= value <= 1 for value in rewards) and any(rewards)
    wanted = {record["prompt"]: record["wanted"] for record in own_environment.prompts()}
    rate = getattr(own_environment, own or "reward")
    first, last = read_lines(tmp_path / "run" / "evaluation.jsonl")
    for line in (first, last):
        assert line["num_prompts"] == 2 and line["num_unrated"] == 0
        for example in line["examples"]:
            prompt, completion = example["prompt"], example["completion"]
            assert example["reward"] == rate(prompt, completion, wanted=wanted[prompt])


def test_a_reward_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = config(tmp_path, sampler={"reward": "doors.own_environment:rewart"})
    with pytest.raises(RewardError, match="has no function rewart"):
        quiet_trainer(given)
