"""With a model: a sample of the tokens is scored, and a gap is attributed as `parity` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from small_runs import sampled_config, tokenised_model, write_lines
from truestep.generate.read import stop_ids
from truestep.model.policy import Policy
from truestep.ranks.group import ALONE
from truestep.run.assemble.policy import make_policy
from truestep.tools.audit.run import Audit, audit
from truestep.tools.parity.sample import sample
from truestep.tools.parity.scores import score
from truestep.types import Rollout

SHARP = {"initializer_range": 0.3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenised_model(tmp_path_factory.mktemp("audit") / "model", "qwen3", **SHARP)


@pytest.fixture(scope="module")
def drawn(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], tuple[Policy, list[Rollout]]]:
    """Rollouts that our own engine drew, at a temperature."""
    folder = tmp_path_factory.mktemp("drawn")
    prompts = write_lines(folder / "prompts.jsonl", [{"prompt": f"w{n} w{n + 7} w{2 * n}"} for n in range(48)])
    made: dict[float, tuple[Policy, list[Rollout]]] = {}

    def draw(temperature: float) -> tuple[Policy, list[Rollout]]:
        if temperature not in made:
            options = {"temperature": temperature, "max_new_tokens": 24}
            config = sampled_config(model, prompts, folder / "run", sampler=options)
            policy = make_policy(config, ALONE)
            assert config.sampler is not None
            made[temperature] = policy, sample(config, config.sampler, policy, 48)
        return made[temperature]

    return draw


def look(rollouts: list[Rollout], model: Path, tmp_path: Path, temperature: float | None) -> Audit:
    records = [
        {
            "id": one.id,
            "input_ids": one.input_ids.tolist(),
            "loss_mask": one.loss_mask.astype(int).tolist(),
            "logprobs": one.logprobs.tolist() if one.logprobs is not None else None,
            "temperature": temperature,
        }
        for one in rollouts
    ]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return audit([path], model=model)


def at_labels(rollouts: list[Rollout], values: np.ndarray) -> list[Rollout]:
    """Rollouts with other log-probs at their labels."""
    made, start = [], 0
    for one in rollouts:
        logprobs = np.zeros(one.num_tokens, np.float32)
        logprobs[one.loss_mask] = values[start : start + one.num_labels]
        start += one.num_labels
        made.append(replace(one, logprobs=logprobs))
    return made


@pytest.mark.parametrize(("temperature", "recorded"), [(1.0, 1.0), (0.7, 0.7), (0.7, None)])
def test_what_our_engine_drew_is_clean(
    temperature: float, recorded: float | None, drawn: Callable, model: Path, tmp_path: Path
) -> None:
    _, rollouts = drawn(temperature)
    result = look(rollouts, model, tmp_path, recorded)
    assert result.scored > 200
    assert not result.findings


def test_a_dump_without_a_gap_needs_no_other_load_of_the_model(
    drawn: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, rollouts = drawn(1.0)

    def load(*given: object, **options: object) -> Policy:
        raise AssertionError("the model is loaded again")

    monkeypatch.setattr("truestep.tools.parity.causes.make_policy", load)
    assert not look(rollouts, model, tmp_path, 1.0).findings


def test_another_temperature_is_named(drawn: Callable, model: Path, tmp_path: Path) -> None:
    result = look(drawn(0.7)[1], model, tmp_path, 1.0)
    assert [one.name for one in result.findings] == ["logprob-temperature"]
    assert "temperature 0.7" in result.findings[0].evidence


def test_log_probs_of_temperature_1_for_tokens_of_another_are_named(
    drawn: Callable, model: Path, tmp_path: Path
) -> None:
    """No gap is left to the model, but the tokens are too likely."""
    policy, rollouts = drawn(0.5)
    hot = [replace(one, temperature=1.0) for one in rollouts]
    changed = at_labels(rollouts, score(policy, hot, 4096).plain)
    result = look(changed, model, tmp_path, 1.0)
    assert [one.name for one in result.findings] == ["sampling-mismatch"]


@pytest.mark.parametrize("cut", ["top-p 0.9", "top-k 20"])
def test_a_truncated_distribution_is_named(cut: str, drawn: Callable, model: Path, tmp_path: Path) -> None:
    policy, rollouts = drawn(1.0)
    wide = score(policy, rollouts, 4096, wide=True)
    values = wide.by_top_p[0.9] if cut == "top-p 0.9" else wide.by_top_k[20]
    inside = np.minimum(values, 0.0)
    result = look(at_labels(rollouts, inside), model, tmp_path, 1.0)
    assert result.findings[0].name == "logprob-truncated"


def with_ends(policy: Policy, rollouts: list[Rollout], more: list[int]) -> tuple[list[Rollout], int]:
    """Put an end token and `more`, with log-probs of 0, behind the samples that were cut; the others end as they did.
    Also return how many were cut."""
    ends = stop_ids(policy)
    added = [min(ends), *more]
    cut = [one for one in rollouts if int(one.input_ids[-1]) not in ends]
    assert len(cut) > 4
    forced = [
        replace(
            one,
            input_ids=np.append(one.input_ids, added),
            loss_mask=np.append(one.loss_mask, [True] * len(added)),
            logprobs=np.append(one.logprobs, np.zeros(len(added), np.float32)),
        )
        for one in cut
    ]
    return [*forced, *(one for one in rollouts if int(one.input_ids[-1]) in ends)], len(cut)


@pytest.mark.parametrize(("recorded", "more"), [(0.7, []), (None, []), (0.7, [5]), (None, [5])])
def test_end_tokens_that_were_not_drawn_are_named_and_no_other_cause(
    recorded: float | None, more: list[int], drawn: Callable, model: Path, tmp_path: Path
) -> None:
    """A template may put another token behind its end token."""
    policy, rollouts = drawn(0.7)
    changed, cut = with_ends(policy, rollouts, more)
    result = look(changed, model, tmp_path, recorded)
    assert [one.name for one in result.findings] == ["end-token-forced"]
    assert not result.clean
    found = result.findings[0]
    assert (found.token, found.count) == (min(stop_ids(policy)), cut)


def test_a_gap_is_said_to_be_over_the_labels_that_it_is_over(drawn: Callable, model: Path, tmp_path: Path) -> None:
    policy, rollouts = drawn(0.7)
    changed, _ = with_ends(policy, rollouts, [])
    found = {one.name: one for one in look(changed, model, tmp_path, 1.0).findings}
    assert f"over {sum(one.num_labels for one in rollouts):,} labels" in found["logprob-temperature"].evidence


def test_log_probs_of_the_next_label_are_named(drawn: Callable, model: Path, tmp_path: Path) -> None:
    _, rollouts = drawn(1.0)
    moved = [
        replace(one, logprobs=np.where(one.loss_mask, np.roll(one.logprobs, -1), 0).astype(np.float32))
        for one in rollouts
        if one.num_labels > 4
    ]
    result = look(moved, model, tmp_path, 1.0)
    assert result.findings[0].name == "logprob-shifted"


def test_other_weights_are_named(drawn: Callable, tmp_path: Path) -> None:
    other = tokenised_model(tmp_path / "other", "qwen3", seed=5, **SHARP)
    result = look(drawn(1.0)[1], other, tmp_path, 1.0)
    assert result.findings[0].name == "logprob-weights"
    assert not result.clean


def test_ids_that_the_model_lacks_are_named(drawn: Callable, model: Path, tmp_path: Path) -> None:
    _, rollouts = drawn(1.0)
    ids = rollouts[3].input_ids.copy()
    ids[-1] = 10_000
    result = look([*rollouts[:3], replace(rollouts[3], input_ids=ids), *rollouts[4:]], model, tmp_path, 1.0)
    assert [one.name for one in result.findings] == ["vocabulary"]
    assert (result.findings[0].position, result.findings[0].token) == (len(ids) - 1, 10_000)
