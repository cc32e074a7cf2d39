"""Runs whose prompts come from several sources and rest: as a plain simulation says, restarted, and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drawing import Draw
from plain_rewards import hopeless_for_some
from ranks.cases import on_ranks, train_all
from small_runs import (
    quiet_trainer,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    without_times,
    word_model,
    write_lines,
)
from truestep.rollouts.kept.files import list_files, read_rows
from truestep.rollouts.source import SourceError

SIZES, WEIGHTS, PER_STEP = {"long": 9, "short": 4}, {"long": 3.0, "short": 1.0}, 4


def prompts_of(name: str) -> list[dict[str, Any]]:
    records = sort_prompts(30)
    return records[: SIZES["long"]] if name == "long" else records[9 : 9 + SIZES["short"]]


def config(folder: Path, run: str, steps: int = 8, **sections: Any) -> Any:
    model = folder / "model"
    files = {name: str(write_lines(folder / f"{name}.jsonl", prompts_of(name))) for name in SIZES}
    base: dict[str, Any] = {
        "data": {"group_size": 2},
        "schedule": {"docs_per_step": 2 * PER_STEP, "steps": steps},
        "sampler": {
            "prompts": files,
            "prompt_weights": WEIGHTS,
            "curriculum": {"rest": 2},
            "reward": "plain_rewards:hopeless_for_some",
        },
        "logging": {"console": False, "rollouts": {"documents": 100}},
        "deterministic": True,
    }
    given = sampled_config(model if model.exists() else word_model(model), Path(), folder / run, **base)
    return given.changed(
        {f"{section}.{name}": value for section, inner in sections.items() for name, value in inner.items()}
    )


def asked(run: Path) -> list[str]:
    """The prompts, by group."""
    found: dict[int, set[str]] = {}
    for file in list_files(run / "rollouts"):
        for row in read_rows(file):
            found.setdefault(int(row["group_id"]), set()).add(row["prompt"])
    assert sorted(found) == list(range(len(found))) and all(len(prompts) == 1 for prompts in found.values())
    return [prompt for _, (prompt,) in sorted(found.items())]


def expected(steps: int) -> list[str]:
    draw, texts = Draw(SIZES, weights=WEIGHTS, rest=2), list[str]()
    for step in range(steps):
        drawn = [draw.next() for _ in range(PER_STEP)]
        texts += [str(prompts_of(source)[at]["prompt"]) for source, at in drawn]
        numbers = range(step * PER_STEP, (step + 1) * PER_STEP)
        draw.step({number: hopeless_for_some(texts[number], "") for number in numbers}, (step + 1) * PER_STEP)
    return texts


def test_a_run_draws_what_a_plain_simulation_says_and_measures_it(tmp_path: Path) -> None:
    held_out = {name: str(tmp_path / f"{name}.jsonl") for name in SIZES}
    evaluation = {"prompts": held_out, "every": 8, "max_prompts": 3}
    run = tmp_path / "run"
    console = said(config(tmp_path, "run", evaluation=evaluation))
    assert f"13 prompts of {tmp_path}/long.jsonl, {tmp_path}/short.jsonl, 2 completions of each" in console
    assert asked(run) == expected(8)
    lines = read_lines(run / "metrics.jsonl")
    assert all((line["source_groups/long"], line["source_groups/short"]) == (3, 1) for line in lines)
    texts = [str(prompt["prompt"]) for name in SIZES for prompt in prompts_of(name)]
    hopeless = sum(hopeless_for_some(text, "") == 0 for text in texts)
    seen = {text for text in expected(3) if hopeless_for_some(text, "") == 0}
    assert 0 < len(seen) <= hopeless
    assert lines[2]["hopeless_prompts"] == pytest.approx(len(seen) / 13), "in the first pass, all that were drawn rest"
    for line in read_lines(run / "evaluation.jsonl"):
        assert line["num_prompts"] == 6
        for metric in ("greedy_reward", "sampled_reward"):
            assert line[metric] == pytest.approx((line[f"{metric}/long"] + line[f"{metric}/short"]) / 2)
    greedy = read_lines(run / "evaluation.jsonl")[-1]["examples"]
    assert [example["source"] for example in greedy] == ["long"] * 3 + ["short"] * 3


def test_hopeless_prompts_are_sampled_less(tmp_path: Path) -> None:
    """Half of 12 prompts are hopeless. In 48 groups they are sampled in the passes 0 and 5, where they would have been
    in all of four."""
    texts = [f"sort {number} 5 =" for number in (0, 3, 2, 5, 4, 7, 6, 9, 8, 3, 0, 5)]
    file = write_lines(tmp_path / "one.jsonl", [{"prompt": text, "answer": "5"} for text in texts])
    one = {"prompts": str(file), "prompt_weights": None, "curriculum": {"rest": 4}}
    quiet_trainer(config(tmp_path, "run", steps=12, sampler=one)).run()
    draw, drawn = Draw({"": 12}, rest=4), list[str]()
    for step in range(12):
        drawn += [texts[draw.next()[1]] for _ in range(PER_STEP)]
        rewards = {number: hopeless_for_some(drawn[number], "") for number in range(step * PER_STEP, len(drawn))}
        draw.step(rewards, len(drawn))
    found = asked(tmp_path / "run")
    assert found == drawn
    hopeless = [hopeless_for_some(text, "") == 0 for text in found]
    assert [sum(hopeless[start:end]) for start, end in ((0, 12), (12, 36), (36, 48))] == [6, 0, 6]
    assert set(found[36:]) == set(texts), "and none is lost"


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    quiet_trainer(config(tmp_path, "whole")).run()
    for steps in (3, 8):
        quiet_trainer(config(tmp_path, "parts", steps=steps)).run()
    for name in ("metrics.jsonl", "ledger.jsonl"):
        whole, parts = (without_times(read_lines(tmp_path / run / name)) for run in ("whole", "parts"))
        assert whole == parts
    assert asked(tmp_path / "parts") == asked(tmp_path / "whole") == expected(8)


@pytest.mark.long
def test_two_ranks_draw_what_one_draws_and_go_on_from_it(tmp_path: Path) -> None:
    quiet_trainer(config(tmp_path, "moved", steps=3)).run()
    given = [config(tmp_path, name, steps=6).model_dump(exclude_unset=True) for name in ("two", "moved")]
    on_ranks(2, train_all, given)
    assert asked(tmp_path / "two") == asked(tmp_path / "moved") == expected(6)
    two, moved = (read_lines(tmp_path / run / "metrics.jsonl") for run in ("two", "moved"))
    for name in ("hopeless_prompts", "easy_prompts/short", "source_passes/short"):
        assert [line[name] for line in two] == [line[name] for line in moved]


def test_other_weights_than_the_checkpoint_s_are_refused_and_other_rests_are_not(tmp_path: Path) -> None:
    quiet_trainer(config(tmp_path, "run", steps=1)).run()
    with pytest.raises(SourceError, match="sampler.prompts, their weights, data.group_size or seed is not what"):
        quiet_trainer(config(tmp_path, "run", sampler={"prompt_weights": {"long": 1, "short": 1}}))
    quiet_trainer(config(tmp_path, "run", steps=2, sampler={"curriculum": None})).run()
    assert "hopeless_prompts" not in read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
