"""Rollouts that the policy makes itself: groups, advantages, order, restarts, rejections, and exact log-probs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from completing import How, in_process_source
from plain_rewards import digit_reward, failing_reward, one_reward
from raters import DirectRater, NumberedRater
from small_runs import (
    WORDS,
    quiet_trainer,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    tokenised_model,
    word_model,
    write_lines,
)
from truestep.environments.prompts import load_prompts
from truestep.environments.rater import FailingRewardError
from truestep.environments.rewards import RewardError
from truestep.generate import play
from truestep.generate.engine.engine import engine_of
from truestep.generate.in_process import InProcessSource
from truestep.generate.read import stop_ids
from truestep.head.logits import HeadSettings
from truestep.losses.label_losses import Grpo
from truestep.losses.objective import Denominator, Objective
from truestep.metrics.types import values
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.rollouts.source import PeekableSource, SourceError
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import Rollout


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(word_model(tmp_path_factory.mktemp("in-process") / "model"))


def make_source(policy: Policy, directory: Path, count: int = 5, **changes: Any) -> InProcessSource:
    prompts = load_prompts(write_lines(directory / "prompts.jsonl", sort_prompts(count)), policy.tokenizer)
    usual: dict[str, Any] = {
        "rater": DirectRater(digit_reward),
        "how": How(0.7, 1.0, 6, 64, stop_ids(policy)),
        "group_size": 4,
        "advantage_rule": "group_mean",
        "seed": 3,
        "max_tokens": 64,
    }
    return in_process_source(policy, prompts=prompts, **(usual | changes))


def same(first: Rollout, second: Rollout) -> bool:
    for item in dataclasses.fields(first):
        mine, theirs = getattr(first, item.name), getattr(second, item.name)
        equal = np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs
        if not equal:
            return False
    return True


def expected_advantages(rewards: list[float], rule: str) -> list[float]:
    if rule == "leave_one_out":
        return [reward - statistics.mean(rewards[:at] + rewards[at + 1 :]) for at, reward in enumerate(rewards)]
    scale = statistics.stdev(rewards) + 1e-4 if rule == "group_normalized" else 1.0
    return [(reward - statistics.mean(rewards)) / scale for reward in rewards]


@pytest.mark.parametrize("rule", ["group_mean", "group_normalized", "leave_one_out"])
def test_groups_and_their_advantages(rule: str, policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path, advantage_rule=rule)
    rollouts = source.take(12, documents_seen=40).documents
    assert [rollout.id for rollout in rollouts] == [f"{group}-{member}" for group in range(3) for member in range(4)]
    for start in (0, 4, 8):
        group = rollouts[start : start + 4]
        assert {rollout.group_id for rollout in group} == {str(start // 4)}
        assert len({rollout.metadata["prompt_id"] for rollout in group}) == 1
        rewards = [rollout.reward for rollout in group]
        assert len(set(rewards)) > 1
        for rollout, expected in zip(group, expected_advantages(rewards, rule), strict=True):
            np.testing.assert_allclose(rollout.advantages[rollout.loss_mask], expected, rtol=1e-6, atol=1e-6)


def test_a_rollout_is_what_was_sampled(policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path)
    prompts = {prompt.id: prompt for prompt in source.prompts}
    rollouts = source.take(20, documents_seen=40).documents
    for rollout in rollouts:
        prompt = prompts[rollout.metadata["prompt_id"]]
        start = len(prompt.input_ids)
        assert tuple(rollout.input_ids[:start]) == prompt.input_ids
        assert rollout.loss_mask.tolist() == [False] * start + [True] * (rollout.num_tokens - start)
        assert (rollout.logprobs[start:] < 0).all()
        assert rollout.temperature == 0.7
        assert (rollout.model_version == 40).all()
        completion = rollout.input_ids[start:].tolist()
        ended = completion[-1] == policy.tokenizer.eos_token_id
        assert rollout.metadata["stopped"] is ended
        assert rollout.truncated is not ended
        assert ended or len(completion) == 6
        text = policy.tokenizer.decode([token for token in completion if token != policy.tokenizer.eos_token_id])
        assert rollout.reward == digit_reward(prompt.prompt, text)
    assert {rollout.metadata["stopped"] for rollout in rollouts} == {True, False}


def test_the_reward_sees_the_prompt_the_text_and_the_fields(policy: Policy, tmp_path: Path) -> None:
    seen = []

    def reward(prompt: str, completion: str, **fields: Any) -> float:
        seen.append((prompt, completion, fields))
        return 0.0

    rollouts = make_source(policy, tmp_path, rater=DirectRater(reward)).take(4, 0).documents
    for (prompt, completion, fields), _ in zip(seen, rollouts, strict=True):
        assert set(fields) == {"answer"}
        assert sorted(prompt.split()[1:-1]) == fields["answer"].split()
        assert "<end>" not in completion
    assert all((rollout.advantages == 0).all() for rollout in rollouts), "equal rewards teach nothing"


def test_each_epoch_is_a_seeded_permutation_of_the_prompts(policy: Policy, tmp_path: Path) -> None:
    def epochs(seed: int) -> list[list[str]]:
        source = make_source(policy, tmp_path, seed=seed, group_size=1)
        # Taken in portions that do not divide an epoch.
        names = [rollout.metadata["prompt_id"] for count in (3, 7, 4, 1) for rollout in source.take(count, 0).documents]
        return [names[start : start + 5] for start in (0, 5, 10)]

    first = epochs(3)
    assert all(sorted(epoch) == [f"prompt-{number}" for number in range(5)] for epoch in first)
    assert len({tuple(epoch) for epoch in first}) == 3
    assert epochs(3) == first
    assert epochs(4) != first


@pytest.mark.parametrize("taken", [0, 4, 16, 24])
def test_a_restored_source_goes_on_bit_for_bit(taken: int, policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path)
    source.take(taken, 0)
    state = json.loads(json.dumps(source.state()))
    expected = source.take(8, taken).documents
    restored = make_source(policy, tmp_path)
    restored.restore(state)
    documents = restored.take(8, taken).documents
    assert all(same(mine, theirs) for mine, theirs in zip(documents, expected, strict=True))
    assert not same(documents[0], make_source(policy, tmp_path, seed=4).take(8, taken).documents[0])


def test_a_file_runs_checkpoint_is_refused_in_words(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"checkpoint\.directory"):
        make_source(policy, tmp_path).restore({"position": 5, "fingerprint": "abc"})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("no such answer"), "raised ValueError: no such answer"),
        (None, "None"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("1.0", "'1.0'"),
        ([1.0], r"\[1.0\]"),
    ],
)
def test_a_completion_without_a_reward_is_sampled_anew_and_the_group_is_whole(
    answer: Any, reason: str, policy: Policy, tmp_path: Path
) -> None:
    def reward(group: int, member: int) -> Any:
        if (group, member) != (0, 1):
            return float(group * 10 + member)
        if isinstance(answer, Exception):
            raise answer
        return answer

    source = make_source(policy, tmp_path, rater=NumberedRater(reward), advantage_rule="leave_one_out")
    taken = source.take(8, 0)
    rollouts = taken.documents
    assert [rollout.id for rollout in rollouts] == ["0-0", "0-2", "0-3", "0-4", "1-0", "1-1", "1-2", "1-3"]
    (rejected,) = taken.rejected
    assert not source.aside().rejected
    assert (rejected.id, rejected.group_id) == ("0-1", "0")
    assert re.search(reason, rejected.reason), rejected.reason
    expected = expected_advantages([0.0, 2.0, 3.0, 4.0], "leave_one_out")
    for rollout, advantage in zip(rollouts[:4], expected, strict=True):
        np.testing.assert_allclose(rollout.advantages[rollout.loss_mask], advantage, rtol=1e-6)


def test_a_group_that_cannot_be_completed_gives_its_place_to_the_next_prompt(policy: Policy, tmp_path: Path) -> None:
    """One completion of the first group is rated, and no other of four times four: nothing of it is trained on."""
    rater = NumberedRater(lambda group, member: 1.0 if group or member == 1 else None)
    source = make_source(policy, tmp_path, rater=rater)
    taken = source.take(4, 0)
    assert [rollout.id for rollout in taken.documents] == ["1-0", "1-1", "1-2", "1-3"]
    rejected = taken.rejected
    assert len(rejected) == 16
    assert [each.id for each in rejected] == [f"0-{number}" for number in range(16)]
    assert rejected[1].reason == "its group could not be completed: 1 of 16 completions rated"
    assert [rollout.id for rollout in source.take(4, 4).documents] == ["2-0", "2-1", "2-2", "2-3"]


def test_completions_that_could_not_fit_are_refused_before_any_is_sampled(policy: Policy, tmp_path: Path) -> None:
    """Rejecting the long ones would train on the short ones alone, and on fewer documents than asked for."""
    with pytest.raises(SourceError, match="6 tokens of prompt prompt-0 and sampler.max_new_tokens: 6 make 12"):
        make_source(policy, tmp_path, max_tokens=11)
    assert len(make_source(policy, tmp_path, max_tokens=12).take(20, 0).documents) == 20


def test_on_bad_record_stop_ends_the_run_at_the_first_reward_that_fails(policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path, rater=DirectRater(failing_reward), stop_at_rejected=True)
    with pytest.raises(RewardError, match="data.on_bad_record: stop: a completion of prompt prompt-"):
        source.take(8, 0)


@pytest.mark.parametrize("change", [{"count": 4}, {"seed": 4}, {"group_size": 2}])
def test_a_restored_source_refuses_other_prompts(change: dict[str, int], policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path)
    source.take(8, 0)
    other = make_source(policy, tmp_path, **change)
    with pytest.raises(SourceError, match="is not what this run was started with"):
        other.restore(source.state())


def test_a_run_whose_documents_are_all_rejected_says_why(policy: Policy, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(3))
    reward = "plain_rewards:fails_in_two_ways"  # one that always fails alike ends the run sooner
    config = sampled_config(policy.path, prompts, tmp_path / "run", sampler={"reward": reward})
    with pytest.raises(SourceError, match=r"rejected\.jsonl"):
        quiet_trainer(config).run()
    rejected = read_lines(tmp_path / "run" / "rejected.jsonl")  # the file that the message sends to
    assert len(rejected) == 8 * 4 * 4  # groups in a row, completions, tries
    assert all("this reward never works" in line["reason"] for line in rejected)


def test_a_reward_that_always_fails_alike_ends_the_run(policy: Policy, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(3))
    config = sampled_config(policy.path, prompts, tmp_path / "run", sampler={"reward": "plain_rewards:failing_reward"})
    words = r"none of the first 16 completions has a reward.*this reward never works"
    with pytest.raises(FailingRewardError, match=words):
        quiet_trainer(config).run()


def test_chat_messages_go_through_the_template(policy: Policy, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}={% endif %}"
    policy.tokenizer.chat_template = template
    messages = [{"role": "system", "content": "sort"}, {"role": "user", "content": "7 2"}]
    file = write_lines(tmp_path / "chat.jsonl", [{"prompt": messages, "answer": "2 7"}])
    prompts = load_prompts(file, policy.tokenizer)
    seen = []

    def reward(prompt: Any, completion: str, **fields: Any) -> float:
        seen.append((prompt, fields))
        return 1.0

    (rollout,) = (
        dataclasses.replace(make_source(policy, tmp_path, group_size=1, rater=DirectRater(reward)), prompts=prompts)
        .take(1, 0)
        .documents
    )
    policy.tokenizer.chat_template = None
    assert policy.tokenizer.decode(rollout.input_ids[:4]) == "sort 7 2 ="
    assert not rollout.loss_mask[:4].any()
    assert seen == [(messages, {"answer": "2 7"})]


def test_nobody_may_look_at_documents_that_are_not_made_yet(policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path)
    assert not isinstance(source, PeekableSource)
    assert not hasattr(source, "peek")
    with pytest.raises(ValueError, match="groups of 4"):
        source.take(6, 0)


def word_reward(prompt: object, completion: str, **_: object) -> float:
    return len(set(completion.split())) / 10


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_on_policy_every_ratio_is_one(
    kind: str, temperature: float, tmp_path: Path, tiny_tokenised: Callable[[str], Path]
) -> None:
    policy = load_policy(tiny_tokenised(kind), head=HeadSettings(fp32=True))
    generator = np.random.default_rng(0)
    records = [{"prompt": " ".join(generator.choice(WORDS, length))} for length in (2, 9, 5, 14)]
    source = in_process_source(
        policy,
        How(temperature, 0.95, 10, 7, stop_ids(policy)),
        prompts=load_prompts(write_lines(tmp_path / "prompts.jsonl", records), policy.tokenizer),
        rater=DirectRater(word_reward),
        group_size=4,
        advantage_rule="group_normalized",
        seed=0,
        max_tokens=64,
    )
    documents = source.take(16, 0).documents
    objective = Objective(Grpo(0.2, 0.2), Denominator("labels", None))
    # Packed in an order and in a company that sampling did not know.
    plan = make_plan(documents, [range(0, 16, 3), range(1, 16, 3), range(2, 16, 3)], 0)
    accumulated = StepRunner(policy, objective, "full", keep_scores=True).accumulate(plan)
    logged = values(accumulated.metrics)
    assert logged["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    assert logged["effective_sample_size"] == pytest.approx(logged["num_labels"], rel=1e-5)
    assert logged["kl_new_old"] == pytest.approx(0, abs=1e-9)
    assert logged["clipped_ratio_fraction"] == 0
    assert logged["staleness"] == 0
    for document, score in zip(documents, accumulated.scores, strict=True):
        ratios = np.exp(score.logprobs.astype(np.float64) - document.logprobs[document.loss_mask])
        np.testing.assert_allclose(ratios, 1, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def tiny_tokenised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = tokenised_model(tmp_path_factory.mktemp("tokenised") / kind, kind)
        return made[kind]

    return model


def prompt_reward(prompt: object, completion: str, **fields: object) -> float:
    """The same for every completion of two prompts in five, and different for the rest."""
    return 1.0 if hash_of(prompt) % 5 < 2 else digit_reward(prompt, completion)


def hash_of(prompt: object) -> int:
    return sum(map(ord, str(prompt)))


def test_groups_without_a_difference_are_replaced(policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path, rater=DirectRater(prompt_reward), replace_limit=50, count=10)
    first, second = source.take(12, 0), source.take(8, 12)
    rollouts = [*first.documents, *second.documents]
    taken = list(dict.fromkeys(str(rollout.group_id) for rollout in rollouts))
    aside = [*first.put_aside, *second.put_aside]
    assert not source.aside().put_aside
    assert len(rollouts) == 20 and len(taken) == 5
    assert {document.reason for document in aside} == {
        "all advantages of its group are 0 (data.zero_advantage: replace)"
    }
    assert sorted(map(int, {*taken, *(str(document.group_id) for document in aside)})) == list(
        range(source.state()["groups"])
    )
    assert all(np.any(rollout.advantages) for rollout in rollouts if rollout.group_id == taken[0])
    # It is what the same groups are without the option, in the same order.
    plain = (
        make_source(policy, tmp_path, rater=DirectRater(prompt_reward), count=10)
        .take(4 * source.state()["groups"], 0)
        .documents
    )
    kept = [rollout for rollout in plain if str(rollout.group_id) in taken]
    assert [rollout.id for rollout in kept] == [rollout.id for rollout in rollouts]
    assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(kept, rollouts, strict=True))


def test_no_more_groups_are_replaced_than_permitted(policy: Policy, tmp_path: Path) -> None:
    source = make_source(policy, tmp_path, rater=DirectRater(one_reward), replace_limit=2)
    taken = source.take(12, 0)
    assert [rollout.group_id for rollout in taken.documents[::4]] == ["2", "3", "4"]
    assert {document.group_id for document in taken.put_aside} == {"0", "1"}


def test_truncated_completions_can_be_masked(policy: Policy, tmp_path: Path) -> None:
    plain = make_source(policy, tmp_path).take(20, 0).documents
    masked = make_source(policy, tmp_path, truncated="mask").take(20, 0).documents
    assert {rollout.truncated for rollout in plain} == {True, False}
    for first, second in zip(plain, masked, strict=True):
        assert second.num_labels == (0 if first.truncated else first.num_labels)
        assert second.truncated or same(first, second), "the baseline is the same"


def test_what_is_put_aside_is_in_the_ledger(tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(6))
    config = sampled_config(
        model,
        prompts,
        tmp_path / "run",
        data={"zero_advantage": "replace", "replace_limit": 1},
        sampler={"reward": "plain_rewards:one_reward"},
    )
    quiet_trainer(config).run()
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    assert [[document["id"] for document in line["put_aside"]] for line in ledger] == [
        [f"{group}-{member}" for member in range(4)] for group in (0, 3, 6)
    ]
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["num_put_aside"] for line in metrics] == [4, 4, 4]


@pytest.mark.parametrize("engine", [True, False])
def test_the_engine_can_be_left_out(engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sampling and in evaluation; what is drawn is the same."""
    asked: list[object] = []

    def seen(policy: Policy, exact: bool) -> object:
        asked.append(policy)
        return engine_of(policy, exact)

    monkeypatch.setattr("truestep.generate.engine.phase.engine_of", seen)
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(4))
    config = sampled_config(
        word_model(tmp_path / "model"),
        prompts,
        tmp_path / "run",
        sampler={"engine": engine},
        evaluation={"prompts": str(prompts), "every": 1, "engine": engine},
        schedule={"steps": 1},
    )
    quiet_trainer(config).run()
    assert bool(asked) is engine


def test_the_parts_of_rewards_and_the_tracebacks_of_failed_ones_are_in_the_runs_files(
    policy: Policy, tmp_path: Path
) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(16))
    options = {"reward": "plain_rewards:in_parts", "reward_workers": 1}
    config = sampled_config(
        policy.path, prompts, tmp_path / "run", sampler=options, schedule={"steps": 1, "docs_per_step": 16}
    )
    quiet_trainer(config).run()
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["rewards/long"] > 0 and line["rewards/half"] > 0
    assert line["reward"] == pytest.approx(line["rewards/long"] + line["rewards/half"])
    rows = parquet.read_table(tmp_path / "run" / "rollouts").to_pylist()
    kept = [(row["reward"], dict(row["rewards"])) for row in rows if row["rejected"] is None]
    assert kept and all(reward == pytest.approx(sum(parts.values())) for reward, parts in kept)
    failed = [record for record in read_lines(tmp_path / "run" / "rejected.jsonl") if "KeyError" in record["reason"]]
    assert failed
    for record in failed:
        lines = record["traceback"].splitlines()
        assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "KeyError: 1"
        assert "in in_parts" in lines[1] and any("in _half" in text for text in lines)


def test_log_probs_that_are_not_the_policys_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own: the run goes on, since no option says how far an engine may be from training."""
    config = sampled_config(
        word_model(tmp_path / "model"), write_lines(tmp_path / "prompts.jsonl", sort_prompts(8)), tmp_path / "run"
    )
    assert "not the policy's" not in said(config)
    honest = play.rollout_of

    def halved(*arguments: Any, **options: Any) -> Any:
        rollout = honest(*arguments, **options)
        return dataclasses.replace(rollout, logprobs=rollout.logprobs / 2)

    monkeypatch.setattr(play, "rollout_of", halved)
    console = " ".join(said(config.changed({"checkpoint.directory": str(tmp_path / "wrong")})).split())
    assert console.count("Its log-probs are not the policy's") == 1, console
    assert "warning: the sampler: " in console and "They are the policy's times 0.5" in console
    assert len(read_lines(tmp_path / "wrong" / "metrics.jsonl")) == 3
