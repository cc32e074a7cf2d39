"""Servers whose probes are right and whose completions are lies: nothing of them is trained on. Honest ones go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner

from ranks.cases import on_ranks, train_all
from selection import in_tiers
from server.liars import BY_NAME, DRAWS, HONEST, LIES, Liar, Plan
from server.lying_runs import Outcome, run
from server.models import make_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import merged, read_lines
from truestep.commands.cli import main
from truestep.ranks.axes import RankError

SHORT = ("those of the next token", "one token in 200 off", "top-p 0.9 kept on", "one completion n times")
MEDIUM = ("0", "-50", "halved", "of the prompt", "before the temperature", "weights stale by one version", "greedy")
MOVING = {"max_staleness": 16}  # a step's documents were drawn by the weights before it
SLOW = {"optimizer": {"learning_rate": 1e-3}}


def found(outcome: Outcome, liar: int = 0) -> bool:
    """The run ended with the liar's name, and no lie is in the weights or the ledger."""
    assert outcome.error is not None, f"a lie that nobody has noticed: {outcome.ended}"
    assert outcome.urls[liar] in outcome.error and "Nothing was updated" in outcome.error, outcome.error
    assert not any(url in outcome.error for place, url in enumerate(outcome.urls) if place != liar)
    assert outcome.kept and outcome.steps * 16 == len(outcome.trained)
    return not outcome.lies_trained_on


@pytest.mark.parametrize("name", in_tiers([way.name for way in (*LIES, DRAWS[0])], SHORT, MEDIUM))
def test_a_lie_of_the_standing_weights_is_never_trained_on(name: str, tmp_path: Path) -> None:
    """From the first completion on; that of older weights from the first that has some."""
    outcome = run(tmp_path, [Plan(BY_NAME[name])])
    assert found(outcome) and outcome.steps == 0


@pytest.mark.parametrize(
    "name", in_tiers([way.name for way in LIES], ("halved",), ("in the reverse order", "0.02 too low"))
)
def test_a_server_that_begins_to_lie(name: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, [Plan(BY_NAME[name], after=16)], **SLOW)
    assert found(outcome) and outcome.steps == 1


@pytest.mark.parametrize("name", in_tiers([way.name for way in HONEST], ("rounded to bfloat16",), ("three decimals",)))
@pytest.mark.parametrize("moving", [False, pytest.param(True, marks=pytest.mark.release)])
def test_an_honest_server_is_never_refused(name: str, moving: bool, tmp_path: Path) -> None:
    sampler = {**MOVING, "check_share": 1.0} if moving else {}
    outcome = run(tmp_path, [Plan(BY_NAME[name])], in_time=moving, sampler=sampler)
    assert outcome.error is None and outcome.steps == 4 and outcome.trained


HALF = {"model": {"dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("weights", "sections"),
    [
        ("current", HALF),
        pytest.param("bfloat16", HALF, marks=pytest.mark.long),
        pytest.param("bfloat16", merged(HALF, {"sampler": {"temperature": 0.2}}), marks=pytest.mark.release),
        pytest.param("current", {"sampler": {"temperature": 0.02}}, marks=pytest.mark.long),
        pytest.param("current", {"sampler": {"max_new_tokens": 1}}, marks=pytest.mark.release),
        pytest.param("current", {"sampler": {"pause": "keep", **MOVING}}, marks=pytest.mark.release),
        pytest.param("current", {"data": {"zero_advantage": "skip"}}, marks=pytest.mark.release),
        pytest.param("current", {"data": {"zero_advantage": "replace"}}, marks=pytest.mark.release),
        pytest.param("current", {"sampler": {**MOVING}, "data": {"truncated": "mask"}}, marks=pytest.mark.release),
        pytest.param("current", {"adapter": {"rank": 4}}, marks=pytest.mark.release),
        pytest.param("current", merged(HALF, {"adapter": {"rank": 4}}), marks=pytest.mark.release),
    ],
)
def test_honest_arithmetic_and_options_are_never_refused(
    weights: str, sections: dict[str, Any], tmp_path: Path
) -> None:
    """Also near-certain tokens (a temperature of 0.02), whose completions are mostly alike."""
    way = type(HONEST[0])("honest", weights=weights)
    outcome = run(tmp_path, [Plan(way)], **merged({"schedule": {"steps": 6}}, sections))
    assert outcome.error is None and outcome.steps == 6


@pytest.mark.parametrize(
    "name",
    [
        "-50",
        *(pytest.param(name, marks=pytest.mark.release) for name in ("top-k 3 kept on", "those of the next token")),
    ],
)
def test_the_one_of_two_servers_that_lies_is_named(name: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, [Plan(HONEST[0]), Plan(BY_NAME[name], after=12)], sampler={"updates": "rolling"})
    assert found(outcome, liar=1)


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"metrics": "none", "old_logprobs": "recompute"}, "schedule": {"updates_per_batch": 2}},
        pytest.param({"data": {"zero_advantage": "skip"}}, marks=pytest.mark.release),
        pytest.param({"loss": {"correction": {"type": "truncate", "high": 2.0}}}, marks=pytest.mark.release),
        pytest.param({"sampler": {"pause": "abort", **MOVING}}, marks=pytest.mark.release),
    ],
)
def test_options_of_a_step_hide_no_lie(sections: dict[str, Any], tmp_path: Path) -> None:
    """A correction or recomputed log-probs would make a wrong one small."""
    assert found(run(tmp_path, [Plan(BY_NAME["halved"], after=16)], **merged(SLOW, sections)))


# ---- tokens whose weights are gone when they are trained on

ALL_CHECKED = {"sampler": {**MOVING, "check_share": 1.0}, "schedule": {"steps": 8}, **SLOW}
FREE = (
    "those of the next token",
    "halved",
    "doubled",
    "0",
    "-50",
    "of another prompt's answer",
    "one completion n times",
)


@pytest.mark.parametrize("name", in_tiers([way.name for way in LIES], (), ("of the 5 likeliest tokens", "-1")))
def test_a_lie_about_older_weights_is_found_where_all_completions_are_scored(name: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, [Plan(BY_NAME[name], after=32)], in_time=True, **ALL_CHECKED)
    found(outcome)
    assert outcome.lies_trained_on <= 32


@pytest.mark.parametrize("name", in_tiers(FREE, ("-50",), ("0", "halved")))
def test_a_gross_lie_about_older_weights_is_found_without_scoring_any(name: str, tmp_path: Path) -> None:
    sections = merged(ALL_CHECKED, {"sampler": {"check_share": 0.0}})
    outcome = run(tmp_path, [Plan(BY_NAME[name], after=32)], **sections)
    found(outcome)
    assert outcome.lies_trained_on <= 64


@pytest.mark.long
def test_a_share_finds_a_lie_within_the_documents_that_its_page_says(tmp_path: Path) -> None:
    """docs/sampling.md: with a share s, 99% are found within 4.6 / s documents that arrived in time."""
    sections = merged(ALL_CHECKED, {"sampler": {"check_share": 0.2}, "schedule": {"steps": 12}})
    outcome = run(tmp_path, [Plan(BY_NAME["top-p 0.9 kept on"], after=32)], in_time=True, **sections)
    found(outcome)
    assert outcome.lies_trained_on <= 4.6 / 0.2 + 32


# ---- evaluation, ranks, the command


def evaluated(directory: Path) -> dict[str, Any]:
    held_out = str(directory / "prompts.jsonl")
    options = {"max_new_tokens": 20, "max_prompts": 12, "samples_per_prompt": 2}
    return {"evaluation": {"prompts": held_out, "servers": True, "every": 2, **options}}


@pytest.mark.parametrize("name", ["halved", pytest.param("top-k 3 kept on", marks=pytest.mark.release)])
def test_a_lie_in_an_evaluation_alone_ends_the_run(name: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, [Plan(BY_NAME[name], after=60, only_longer_than=16)], **evaluated(tmp_path))
    assert outcome.error is not None and outcome.error.startswith(f"evaluation: {outcome.urls[0]}")
    assert len(read_lines(tmp_path / "run" / "evaluation.jsonl")) == 1, "the first one was honest"


@pytest.mark.long
def test_an_honest_evaluation_goes_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, [Plan(HONEST[0])], **evaluated(tmp_path))
    assert outcome.error is None and len(read_lines(tmp_path / "run" / "evaluation.jsonl")) == 3


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({}, marks=pytest.mark.release),
        pytest.param({"pipeline": 2}, marks=pytest.mark.long),
        pytest.param({"tensor": 2}, marks=pytest.mark.release),
        pytest.param({"context": 2}, marks=pytest.mark.release),
    ],
)
@pytest.mark.parametrize("moving", [False, pytest.param(True, marks=pytest.mark.release)])
def test_every_rank_ends_with_the_same_words(parallel: dict[str, int], moving: bool, tmp_path: Path) -> None:
    liar = Liar(make_model(tmp_path / "served", seed=100), NAME, Plan(BY_NAME["top-p 0.9 kept on"], after=32))
    with serving(liar) as url:
        sampler = {"protocol": "sglang", **({**MOVING, "check_share": 1.0} if moving else {})}
        config = server_config(tmp_path, [url], parallel=parallel, sampler=sampler, schedule={"steps": 8}, **SLOW)
        with pytest.raises(RankError) as raised:
            on_ranks(2, train_all, [config.model_dump()])
    said = str(raised.value)
    for rank in (0, 1):
        assert any(
            f"rank {rank}: " in line and url in line and "not the policy's" in line for line in said.splitlines()
        )
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) >= 2


def test_the_command_ends_with_an_error(tmp_path: Path) -> None:
    liar = Liar(make_model(tmp_path / "served", seed=100), NAME, Plan(BY_NAME["0"]))
    with serving(liar) as url:
        config = server_config(tmp_path, [url], sampler={"protocol": "sglang"})
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        outcome = CliRunner().invoke(main, ["train", str(file)])
    assert outcome.exit_code == 1
    words = " ".join(outcome.output.split())
    assert url in words and "They are 0 for every token" in words and "Traceback" not in words


# ---- the liars themselves: a lie that is none would prove nothing


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("lies")
    return make_model(folder / "served", seed=100), make_model(folder / "other", seed=101)


@pytest.mark.parametrize("way", [way for way in LIES if way.weights != "older"], ids=lambda way: way.name)
def test_a_lie_is_one(way: Any, models: tuple[Path, Path]) -> None:
    """Some log-prob is 0.005 or more from the model's own, or a completion is another one's."""
    served, other = models
    liar = Liar(served, NAME, Plan(way))
    if way.weights == "first":
        liar._load(other)
    sampling = {"n": 6, "temperature": 0.8, "max_new_tokens": 16, "stop_token_ids": [0]}
    prompts = [[3, 4, 5, 6, 7], [7, 8, 9], [5, 5, 6, 7, 8, 9]]
    answers = [
        (prompt, one)
        for prompt in prompts * 2
        for one in liar._answers({"input_ids": prompt, "sampling_params": sampling})
    ]
    gaps, texts = [], []
    for prompt, answer in answers:
        tokens = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        with torch.no_grad():
            rows = (liar._model(torch.tensor([prompt + tokens])).logits[0].float() / 0.8).log_softmax(-1)
        own = [float(rows[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens)]
        given = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
        gaps.append(float(np.abs(np.array(own) - np.array(given)).max()))
        texts.append(tuple(tokens))
    assert max(gaps) > 0.005 or len(set(texts)) <= len(texts) * 0.9


# ---- the page


def test_the_page_has_every_lie_and_what_became_of_it() -> None:
    page = (Path(__file__).parents[2] / "docs/lies.md").read_text(encoding="utf-8").splitlines()
    for way in LIES:
        free = "found" if way.name in FREE else ""
        assert f"| {way.name} | never trained on | found | {free} |" in page
    for way in HONEST:
        assert f"| {way.name} | never refused |" in page
