"""Episodes that are programs: what they ask for and how they end becomes documents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from small_runs import kept_rows, read_lines, said, sampled_config, sort_prompts, word_model, write_lines
from truestep.config.load import ConfigError, config_of
from truestep.environments.episodes import program
from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rewards import Rating, RewardError
from truestep.generate.command import CommandPlay
from truestep.generate.endpoint.keys import SecretKeys, Served
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.generator import DrawOptions
from truestep.generate.play import Episode, EpisodeLimits, Played
from truestep.model.loading.load import load_policy

PROGRAM = Path(__file__).with_name("sorts.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("command") / "model")


def trained(model: Path, tmp_path: Path, how: str, *, steps: int = 1, name: str = "run", **options: Any) -> str:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(8))
    run = [sys.executable, str(PROGRAM), how, "{prompt}"]
    sampler = {"reward": None, "environment": {"type": "command", "run": run}, "max_episode_tokens": 64, **options}
    sections: dict[str, Any] = {
        "logging": {"rollouts": {"documents": 100}},
        "schedule": {"docs_per_step": 8, "steps": steps},
        "seed": 5,
    }
    return said(sampled_config(model, prompts, tmp_path / name, sampler=sampler, **sections))


def test_a_run_trains_on_what_programs_write(model: Path, tmp_path: Path) -> None:
    console = trained(model, tmp_path, "ends", steps=2)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["num_documents"] for line in lines] == [8, 8]
    for line in lines:
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-6)
    assert "a program asked for temperature 0.3, but completions to train on are drawn as" in console
    rows = kept_rows(tmp_path / "run")
    assert len(rows) == 16
    for row in rows:
        assert row["reward"] == pytest.approx(sum(dict(row["rewards"]).values())) and not row["truncated"]
        assert row["length"] < row["tokens"] and " sort 3 1 =" in row["completion"]


def test_a_run_whose_programs_are_forks_is_the_same_run(model: Path, tmp_path: Path) -> None:
    run = [sys.executable, str(PROGRAM), "ends", "{prompt}"]
    trained(model, tmp_path, "ends", name="new")
    environment = {"type": "command", "run": run, "preload": ["json", "urllib.request"]}
    trained(model, tmp_path, "ends", name="forks", environment=environment)
    new, forks = (
        [(row["id"], row["completion"], row["reward"]) for row in kept_rows(tmp_path / name)]
        for name in ("new", "forks")
    )
    assert new == forks and len(new) == 8


def test_a_module_that_is_not_there_ends_the_run(model: Path, tmp_path: Path) -> None:
    environment = {"type": "command", "run": [sys.executable, str(PROGRAM)], "preload": ["no_such_module"]}
    with pytest.raises(RewardError, match="preload: no_such_module cannot be imported"):
        trained(model, tmp_path, "ends", environment=environment)


def test_branches_are_sequences_of_one_document(model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path, "branches")
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["num_documents"] == 8 and line["num_sequences"] == 24, "a branch, and a prompt of its own"
    assert line["ratio_new_old"] == pytest.approx(1, abs=1e-6)


def test_a_program_that_fails_costs_its_document_alone(model: Path, tmp_path: Path) -> None:
    trained(model, tmp_path, "fails")
    assert [line["num_documents"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [8]
    rejected = read_lines(tmp_path / "run" / "rejected.jsonl")
    assert any("the program ended with exit code 3" in each["reason"] for each in rejected)
    assert "about to fail" in (tmp_path / "run" / "rewards.log").read_text()


def played(model: Path, how: str, *, turns: int = 8, seconds: float = 60.0, count: int = 2) -> list[Played]:
    """Play episodes in process, without a run."""
    policy = load_policy(model)
    options = {"run": [sys.executable, str(PROGRAM), how, "{prompt}"]}
    service = EpisodeService(WorkerOptions(program.CLASS, 30.0, 2**30), 1, options)
    limits = EpisodeLimits(turns, 64, seconds)
    play = CommandPlay(service, policy.tokenizer, limits, stops_by_text=True, say=lambda _: None)
    draw = DrawOptions(1.0, 6, frozenset())
    prompts = [Prompt(str(number), f"sort {number} =", {}, ()) for number in range(count)]
    episodes = [Episode(prompt, draw, (3, number), f"e{number}") for number, prompt in enumerate(prompts)]
    try:
        return EngineGenerator(policy).map(episodes, play.play)
    finally:
        play.close()


def test_a_limit_cuts_a_document_which_keeps_its_reward(model: Path) -> None:
    for each in played(model, "goes on", turns=5):
        assert each.truncated and float(each.rating) == 2.0  # type: ignore[arg-type]
        assert each.metadata["ended_by"] == "max_turns" and each.metadata["num_turns"] == 5
        assert len(each.sequences) == 4, "two turns in one, and three branches"
        rewards = [turn.reward for one in each.sequences for turn in one.turns if one.loss_mask[turn.start]]
        assert rewards == [1.0, None, None, None, None]


def test_a_program_that_hangs_is_cut_by_its_timeout(model: Path) -> None:
    for each in played(model, "hangs", seconds=6.0):
        assert each.truncated and float(each.rating) == 0.5 and each.num_drawn  # type: ignore[arg-type]
        assert each.metadata["ended_by"] == "episode_timeout"


def test_without_a_reward_it_says_how_to_give_one(model: Path) -> None:
    for each in played(model, "says nothing"):
        assert isinstance(each.rating, RewardError) and "/documents/$OPENAI_API_KEY/reward" in str(each.rating)


def test_a_reward_of_0_keeps_its_parts(model: Path) -> None:
    for each in played(model, "is wrong"):
        assert isinstance(each.rating, Rating) and float(each.rating) == 0
        assert each.rating.parts == {"right": 0.0, "short": 0.0}


def test_a_key_ends_with_its_episode(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[SecretKeys, str]] = []
    honest = SecretKeys.add

    def add(keys: SecretKeys, served: Served) -> str:
        made.append((keys, honest(keys, served)))
        return made[-1][1]

    monkeypatch.setattr(SecretKeys, "add", add)
    played(model, "ends")
    assert len(made) == 2 and all(len(key) == len("sk-") + 32 for _, key in made)
    assert all(keys.find(key) is None for keys, key in made)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"group_size": 2, "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 4, "steps": 1},
    }
    for given, others, problem in (
        ({"type": "command"}, {}, "environment needs run with type: command"),
        ({"type": "python"}, {}, "environment needs class with type: python"),
        ({"class": "a:B", "run": "x"}, {}, "environment.run is for type: command"),
        ({"type": "command", "run": "x", "class": "a:B"}, {}, "environment.class is for type: python"),
        ({"class": "a:B", "preload": ["json"]}, {}, "environment.preload is for type: command"),
        ({"type": "command", "run": "x", "options": {"a": 1}}, {}, "options are not for type: command"),
        ({"type": "command", "run": "x"}, {"reward_network": False}, "reward_network: false would keep the program"),
        ({"type": "verifiers"}, {"reward_network": False}, "reward_network: false would keep the program"),
        ({"type": "verifiers"}, {}, "sampler.prompts is not for sampler.environment.type: verifiers"),
    ):
        sampler = {"prompts": "p", "environment": given, "max_episode_tokens": 64, **others}
        with pytest.raises(ConfigError) as refused:
            config_of({**base, "sampler": sampler})
        assert problem in str(refused.value)
