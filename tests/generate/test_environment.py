"""Episodes of several turns in process: what becomes of them is a document that the policy scores as it was drawn."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from small_runs import kept_rows, read_lines, said, sampled_config, sort_prompts, word_model, write_lines
from truestep.config.load import ConfigError, config_of
from truestep.environments.episodes.service import EpisodeService
from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt, load_prompts
from truestep.environments.rewards import RewardError
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.environment import EnvironmentPlay
from truestep.generate.generator import Completion, DrawOptions, Generate, Request
from truestep.generate.play import Episode, EpisodeLimits, Played
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy

ENDS = ["=", "1", "2", "3"]  # texts that end a turn: few tokens of the tiny model's are its end of text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("environment") / "model")


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    return load_policy(model)


@pytest.fixture(scope="module")
def prompts(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    file = write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", sort_prompts(8))
    return load_prompts(file, policy.tokenizer)


@contextmanager
def plays(
    policy: Policy, kind: str, timeout: float = 30.0, turns: int = 8, tokens: int = 64, seconds: float = 60.0
) -> Iterator[EnvironmentPlay]:
    service = EpisodeService(WorkerOptions(f"turn_environments:{kind}", timeout, 2**30), 1)
    play = EnvironmentPlay(service, policy.tokenizer, EpisodeLimits(turns, tokens, seconds))
    try:
        yield play
    finally:
        play.close()


def played(policy: Policy, prompts: list[Prompt], play: EnvironmentPlay, **draw: Any) -> list[Played]:
    how = DrawOptions(
        **({"temperature": 1.0, "max_new_tokens": 12, "stop_ids": frozenset(), "stop": tuple(ENDS)} | draw)
    )
    generator = EngineGenerator(policy)
    generator.weights(7)
    episodes = [Episode(prompt, how, (3, 1, number), f"e{number}") for number, prompt in enumerate(prompts)]

    async def work(episode: Episode, generate: Generate) -> Played:
        return await play.play(episode, generate)

    return generator.map(episodes, work)


def scored(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probs of each token given those before it, by one forward pass of transformers' own model."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    picked = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1, dtype=torch.float64), picked])


def test_drawn_tokens_are_the_labels_with_the_log_probs_of_one_pass(
    model: Path, policy: Policy, prompts: list[Prompt]
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with plays(policy, "Sorting") as play:
        done = played(policy, prompts, play)
    answer = policy.tokenizer("sort 3 1 =")["input_ids"]
    assert any(len(each.completions) == 3 for each in done)
    for number, (each, prompt) in enumerate(zip(done, prompts, strict=True)):
        assert not isinstance(each.rating, RewardError)
        document = each.document(f"d{number}", prompt, 1.0)
        expected: list[int] = list(prompt.input_ids)
        mask = [False] * len(expected)
        for turn, completion in enumerate(each.completions):
            given = answer if turn else []
            expected += [*given, *completion.token_ids]
            mask += [False] * len(given) + [True] * len(completion.token_ids)
        assert document.input_ids.tolist() == expected
        assert document.loss_mask.tolist() == mask
        of_one_pass = scored(plain, expected)[document.loss_mask]
        torch.testing.assert_close(
            torch.tensor(document.logprobs[document.loss_mask]).double(), of_one_pass, atol=1e-5, rtol=0
        )
        assert document.model_version is not None and set(document.model_version) == {7}
        own = [turn for turn in document.turns if turn.role == "assistant"]
        assert len(own) == len(each.completions)
        if each.metadata["ended_by"] == "environment":
            assert not document.truncated
            assert [turn.reward for turn in own] == pytest.approx([turn.reward for turn in own])
            assert document.rewards["order"] == pytest.approx(sum(turn.reward or 0 for turn in own))


def test_limits_cut_an_episode_which_stays_a_document(policy: Policy, prompts: list[Prompt]) -> None:
    with plays(policy, "Sorting", turns=2) as play:
        for each in played(policy, prompts, play, max_new_tokens=40):
            cut = each.metadata["ended_by"]
            assert (cut == "max_turns" and len(each.completions) == 2) or cut == "max_episode_tokens", cut
            assert each.truncated and float(each.rating) == -1.0, "what `cut` gives"  # type: ignore[arg-type]
    with plays(policy, "Sorting", tokens=14) as play:
        for each, prompt in zip(played(policy, prompts, play), prompts, strict=True):
            assert each.metadata["ended_by"] in ("max_episode_tokens", "max_new_tokens")
            document = each.document("d", prompt, 1.0)
            assert document.num_tokens <= 14 and document.loss_mask[-1], "what was said last is left out"


@pytest.mark.parametrize(
    ("limits", "cause", "advice"),
    [
        ({"tokens": 2}, "sampler.max_episode_tokens: 2", "raise the limit, or shorten the prompts"),
        ({"seconds": 0.25}, "sampler.episode_timeout: 0.25", "raise the limit"),
    ],
)
def test_an_episode_without_a_turn_names_the_limit_and_what_to_do(
    limits: dict[str, Any], cause: str, advice: str, policy: Policy, prompts: list[Prompt]
) -> None:
    async def draws_late(request: Request) -> Completion:
        await asyncio.sleep(60)
        raise AssertionError("the episode waited for its draw past the limit")

    with plays(policy, "Sorting", **limits) as play:
        options = DrawOptions(temperature=1.0, max_new_tokens=12, stop_ids=frozenset())
        first = asyncio.run(play.play(Episode(prompts[0], options, (3, 1, 0), "e0"), draws_late))
    assert str(first.rating) == (
        f"{cause} ended an episode before the policy drew a token, so there is nothing to learn from the episode: "
        f"{advice}"
    )


def test_tokens_go_in_as_they_are(policy: Policy, prompts: list[Prompt]) -> None:
    with plays(policy, "Tokens") as play:
        for each in played(policy, prompts, play):
            ids = list(each.sequences[0].input_ids)
            assert ids[:3] == [2, 3, 4]
            if len(each.completions) == 2:
                length = 3 + len(each.completions[0].token_ids)
                assert ids[length : length + 2] == [5, 6] and float(each.rating) == 1.0  # type: ignore[arg-type]


def test_what_hangs_is_cut_by_its_timeout_and_keeps_nobody_up(policy: Policy, prompts: list[Prompt]) -> None:
    start = time.monotonic()
    with plays(policy, "Sleeping", seconds=1.5) as play:
        done = played(policy, prompts, play)
    assert time.monotonic() - start < 45
    for each in done:
        if each.metadata["ended_by"] == "episode_timeout":
            assert each.truncated and float(each.rating) == 0.0  # type: ignore[arg-type]
    assert any(each.metadata["ended_by"] == "episode_timeout" for each in done)
    with plays(policy, "Sleeping", timeout=0.5) as play:
        late = [each.rating for each in played(policy, prompts, play) if isinstance(each.rating, RewardError)]
    assert late and all("0.5" in str(error) for error in late)


def test_an_environment_that_fails_costs_its_document_alone(tmp_path: Path) -> None:
    own = {
        "reward": None,
        "environment": {"class": "turn_environments:Failing"},
        "stop": ENDS,
        "max_episode_tokens": 64,
    }
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(8))
    said(sampled_config(word_model(tmp_path / "model"), prompts, tmp_path / "run", sampler=own))
    assert [line["num_documents"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [8] * 3
    rejected = read_lines(tmp_path / "run" / "rejected.jsonl")
    assert any("this environment cannot go on" in each["reason"] for each in rejected)
    assert any("turn_environments.py" in str(each.get("traceback")) for each in rejected)


def test_a_run_trains_and_evaluates_on_episodes(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(8))
    environment = {"class": "turn_environments:Sorting", "options": {"turns": 2}}
    own = {"reward": None, "environment": environment, "stop": ENDS, "max_episode_tokens": 64}
    evaluation = {"prompts": str(prompts), "every": 2, "stop": ENDS}
    sections: dict[str, Any] = {"evaluation": evaluation, "logging": {"rollouts": {"documents": 100}}}
    said(sampled_config(word_model(tmp_path / "model"), prompts, tmp_path / "run", sampler=own, **sections))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["num_documents"] for line in lines] == [8] * 3
    for line in lines:
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-6)
    rows = kept_rows(tmp_path / "run")
    assert any("sort 3 1 =" in row["completion"] for row in rows)
    evaluated = read_lines(tmp_path / "run" / "evaluation.jsonl")
    assert all(line["greedy_reward"] is not None and line["num_unrated"] == 0 for line in evaluated)


def test_contradictions_are_refused(tmp_path: Path) -> None:
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"group_size": 2, "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 4, "steps": 1},
    }
    environment = {"class": "turn_environments:Sorting"}
    for sampler, problem in (
        ({"reward": "a:b", "environment": environment}, "one of the two"),
        ({"reward": "a:b", "max_turns": 3}, "sampler.max_turns is for sampler.environment"),
        ({"environment": environment}, "is more than data.tokens_per_microbatch: 64"),
    ):
        with pytest.raises(ConfigError, match=problem):
            config_of({**base, "sampler": {"prompts": "p", **sampler}})
    config_of({**base, "sampler": {"prompts": "p", "environment": environment, "max_episode_tokens": 64}})


def test_episodes_are_the_same_twice(policy: Policy, prompts: list[Prompt]) -> None:
    with plays(policy, "Sorting") as play:
        first, second = (played(policy, prompts, play) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]
        assert one.rating == other.rating
        assert dataclasses.asdict(one.sequences[0])["turns"] == dataclasses.asdict(other.sequences[0])["turns"]
