"""Runs whose environment makes its own prompts, for training and for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.cases import on_ranks, train_all
from small_runs import quiet_trainer, read_lines, said, sampled_config, without_times, word_model
from truestep.environments.rewards import RewardError
from truestep.rollouts.kept.files import list_files, read_rows
from truestep.rollouts.source import SourceError
from truestep.tools.parity.gap import parity

ENDS = ["=", "1", "2", "3"]


def config(folder: Path, run: str, options: dict[str, Any] | None = None, kind: str = "Own", **sections: Any) -> Any:
    model = folder / "model"
    environment = {"class": f"turn_environments:{kind}", "options": options or {}}
    sampler = {"reward": None, "environment": environment, "stop": ENDS, "max_episode_tokens": 64, "prompts": None}
    return sampled_config(
        model if model.exists() else word_model(model), Path(), folder / run, **{"sampler": sampler, **sections}
    )


def ledger(run: Path) -> list[Any]:
    return read_lines(run / "ledger.jsonl")


def test_a_run_trains_and_evaluates_on_them_and_goes_on_with_the_same(tmp_path: Path) -> None:
    evaluation = {"every": 2, "stop": ENDS}
    whole = said(config(tmp_path, "whole", evaluation=evaluation, deterministic=True))
    assert "8 prompts of the environment, 4 completions of each" in whole
    assert "sampled here" in whole
    said(config(tmp_path, "parts", evaluation=evaluation, deterministic=True, schedule={"steps": 2}))
    said(config(tmp_path, "parts", evaluation=evaluation, deterministic=True))
    for name in ("metrics.jsonl", "evaluation.jsonl", "ledger.jsonl"):
        assert (
            without_times(read_lines(tmp_path / "whole" / name))[-1]
            == without_times(read_lines(tmp_path / "parts" / name))[-1]
        )
    evaluated = read_lines(tmp_path / "whole" / "evaluation.jsonl")
    prompts = {example["prompt"] for line in evaluated for example in line["examples"]}
    assert prompts == {"sort 0 8 =", "sort 0 9 =", "sort 1 0 ="}, "the other two are trained on"
    assert all(line["num_prompts"] == 3 and line["num_unrated"] == 0 for line in evaluated)


def test_other_prompts_than_the_checkpoint_s_are_refused(tmp_path: Path) -> None:
    quiet_trainer(config(tmp_path, "run", schedule={"steps": 1})).run()
    with pytest.raises(SourceError, match="the environment now makes other prompts"):
        quiet_trainer(config(tmp_path, "run", {"count": 9}))


@pytest.mark.parametrize(
    ("kind", "options", "sections", "problem"),
    [
        ("Sorting", {}, {}, "the environment makes no prompts for training"),
        ("Made", {"rows": "raises"}, {}, "the environment's rows raised ValueError: no more of them"),
        ("Own", {"count": -3}, {"evaluation": {"every": 2}}, "the environment makes no prompts for training"),
    ],
)
def test_an_environment_without_prompts_ends_the_run_before_the_model_is_loaded(
    kind: str, options: dict[str, Any], sections: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    given = config(tmp_path, "run", options, kind, **sections)
    with pytest.raises(RewardError, match=problem):
        quiet_trainer(given.model_copy(update={"model": given.model.model_copy(update={"path": "no/such/model"})}))


def test_held_out_prompts_that_are_all_trained_on_are_refused(tmp_path: Path) -> None:
    given = config(tmp_path, "run", {"rows": "many"}, "Made", evaluation={"every": 2})
    with pytest.raises(RewardError, match="each prompt that it makes for evaluation is one that it trains on"):
        quiet_trainer(given)


def test_all_ranks_have_the_prompts_that_one_process_made(tmp_path: Path) -> None:
    """Each process would make others: they are drawn from the system's random numbers."""
    sections: dict[str, Any] = {"schedule": {"steps": 2, "docs_per_step": 16}}
    sections["logging"] = {"rollouts": {"documents": 100}}
    given = config(tmp_path, "run", {"drawn": True, "count": 30}, **sections)
    on_ranks(2, train_all, [given.model_dump(exclude_unset=True)])
    assert [line["num_documents"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [16, 16]
    asked = {}  # by group: the prompt that each of its documents has, whichever rank played it
    for file in list_files(tmp_path / "run" / "rollouts"):
        for row in read_rows(file):
            asked.setdefault(row["group_id"], set()).add(row["prompt"])
    assert len(asked) == 8 and all(len(prompts) == 1 for prompts in asked.values())


def test_parity_asks_them_too(tmp_path: Path) -> None:
    assert parity(config(tmp_path, "run"), documents=8).documents == 8
