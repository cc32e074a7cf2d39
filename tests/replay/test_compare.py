"""The first difference between two runs, and its cause: order, data, option or numerics."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from small_runs import change_plans, file_config, quiet_trainer, read_lines, tell, write_lines, write_rollouts
from truestep.commands.cli import main
from truestep.errors import TruestepError
from truestep.run.trainer import Trainer
from truestep.tools.replay.compare import compare
from truestep.types import StepPlan

Model = Callable[[str], Path]


@pytest.fixture
def run(tiny_model: Model, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, change: Callable[[Trainer], None] = lambda trainer: None, **sections: Any) -> Path:
        if not (tmp_path / "r.jsonl").exists():
            write_rollouts(tmp_path / "r.jsonl", 20)
        options: dict[str, Any] = {"logging": {"rollouts": {"documents": "all"}}, "deterministic": True, **sections}
        trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / name, **options))
        change(trainer)
        trainer.run()
        return tmp_path / name

    return make


def test_equal_runs_have_no_difference(run: Callable[..., Path]) -> None:
    found = compare(run("a"), run("b"))
    assert found.step is None and found.cause == "nothing"
    assert found.text == "4 steps, 1 to 4, are the same: documents, metrics, the bits of the weights"


def test_an_order_that_a_seed_makes_is_an_option(run: Callable[..., Path]) -> None:
    one, other = (
        run(f"seed{seed}", data={"shuffle": True}, seed=seed, schedule={"docs_per_step": 20}) for seed in (1, 2)
    )
    found = compare(one, other)
    assert (found.step, found.cause) == (1, "option")
    assert "the same documents are in another order" in found.text and "seed is 1 and 2" in found.text


def test_order_and_data_without_an_option(run: Callable[..., Path], tmp_path: Path) -> None:
    first = run("a")
    records = read_lines(tmp_path / "r.jsonl")
    write_lines(tmp_path / "r.jsonl", [*records[:5], records[6], records[5], *records[7:]])
    found = compare(first, run("b"))
    assert (found.step, found.cause) == (2, "order")
    assert f"number 1 is {records[5]['id']} in the first run and {records[6]['id']} in the second" in found.text
    write_lines(tmp_path / "r.jsonl", [*records[:7], {**records[7], "id": "new"}, *records[8:]])
    found = compare(first, run("c"))
    assert (found.step, found.cause) == (2, "data") and "new only in the second" in found.text


def test_another_value_of_a_document_is_named_with_its_place(run: Callable[..., Path]) -> None:
    """By the kept records of both runs; without them the digests tell tokens from values."""

    def change(plan: StepPlan) -> StepPlan:
        document = plan.documents[1]
        if plan.documents_seen != 10 or document.logprobs is None:
            return plan
        logprobs = document.logprobs.copy()
        place = document.loss_mask.nonzero()[0][2]
        logprobs[place] = -7.5
        return replace(plan, documents=(plan.documents[0], replace(document, logprobs=logprobs), *plan.documents[2:]))

    first, second = run("a"), run("b", lambda trainer: change_plans(trainer, change))
    name = read_lines(first / "ledger.jsonl")[2]["documents"][1]
    found = compare(first, second)
    assert (found.step, found.cause) == (3, "data")
    assert f"1 of 5 documents are not the same: {name} has other logprobs at label 2: " in found.text
    assert " and -7.5" in found.text
    for file in (second / "records").iterdir():
        file.unlink()
    assert f"{name} has other values (log-probs" in compare(first, second).text


def test_an_option_is_named_with_the_difference_that_it_makes(run: Callable[..., Path]) -> None:
    found = compare(run("a"), run("b", loss={"epsilon_high": 0.01}))
    assert found.cause == "option" and "loss.epsilon_high is 0.2 and 0.01" in found.text
    found = compare(run("c"), run("d", optimizer={"weight_decay": 0.5}))
    assert (found.step, found.cause) == (1, "option")
    assert "optimizer.weight_decay is 0.0 and 0.5" in found.text


def test_other_first_weights_are_named(run: Callable[..., Path], tmp_path: Path, tiny_model: Model) -> None:
    changed = shutil.copytree(tiny_model("llama"), tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1 << 18
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    first = run("a")
    sections: dict[str, Any] = {"logging": {"rollouts": {"documents": "all"}}, "deterministic": True}
    quiet_trainer(file_config(changed, tmp_path / "r.jsonl", tmp_path / "b", **sections)).run()
    found = compare(first, tmp_path / "b")
    assert (found.step, found.cause) == (1, "option")
    assert "the runs began with other weights (model.path): the bits of model.norm.weight differ" in found.text


def test_numerics_of_another_layout_and_of_a_flipped_bit(run: Callable[..., Path]) -> None:
    first = run("a")
    found = compare(first, run("b", data={"tokens_per_microbatch": 30}))
    assert (found.step, found.cause) == (1, "numerics")
    assert "layout or machine round otherwise (data.tokens_per_microbatch is 40 and 30)" in found.text

    def flip(trainer: Trainer) -> None:
        def after(step: int, plan: object, scores: object) -> None:
            if step == 2:
                weight = trainer.policy.weights.master["model.layers.1.mlp.up_proj.weight"]
                with torch.no_grad():
                    weight.view(torch.int32)[3, 4] ^= 1 << 12

        tell(trainer, trained=after)

    found = compare(first, run("c", flip))
    assert (found.step, found.cause) == (3, "numerics")
    assert "Something else made the difference" in found.text and "a bit that flipped" in found.text


def test_a_weight_that_an_update_left_otherwise_is_the_only_one_named(run: Callable[..., Path]) -> None:
    """One bit, between an update and the end of its step: no metric of the step sees it."""

    def flip(trainer: Trainer) -> None:
        update = trainer.learner.trace
        assert update is not None
        ask = update.ask

        def flipped(squares: Any = None) -> None:
            if trainer.step == 1:  # the second step is being made
                with torch.no_grad():
                    trainer.policy.weights.master["model.layers.0.mlp.down_proj.weight"].view(torch.int32)[0, 0] ^= 1
            ask(squares)

        update.ask = flipped  # type: ignore[method-assign]

    found = compare(run("a"), run("b", flip))
    assert (found.step, found.cause) == (2, "numerics")
    assert "the bits of model.layers.0.mlp.down_proj.weight, while all metrics are the same" in found.text


@pytest.mark.parametrize("file", ["ledger.jsonl", "metrics.jsonl", "weights.jsonl", "weight_names-*.json"])
def test_damaged_files_of_a_run_end_in_words(file: str, run: Callable[..., Path], tmp_path: Path) -> None:
    """A bit or a character of a file changed at chance, or the rest of it lost: no error but our own."""
    first, draw = run("a"), random.Random(5)
    shutil.copytree(first, tmp_path / "b")
    outcomes = {compare(first, tmp_path / "b").text}
    (path,) = first.glob(file)
    whole = path.read_bytes()
    for number in range(36):
        content, place = bytearray(whole), draw.randrange(len(whole))
        if number % 3:
            content[place] = content[place] ^ 1 << draw.randrange(8) if number % 3 == 1 else draw.choice(b'[]{}"0a,-.')
        path.write_bytes(content if number % 3 else content[:place])
        try:
            outcomes.add(compare(first, tmp_path / "b").text)
        except TruestepError as error:
            outcomes.add(str(error))
    assert len(outcomes) > 1 and all(outcomes)


@pytest.mark.parametrize("file", ["ledger.jsonl", "metrics.jsonl", "weights.jsonl", "weight_names-*.json"])
def test_values_of_other_types_end_in_words(file: str, run: Callable[..., Path], tmp_path: Path) -> None:
    first = run("a")
    shutil.copytree(first, tmp_path / "b")
    (path,) = first.glob(file)
    line = read_lines(path)[1] if path.suffix == ".jsonl" else None
    for odd in (None, 5, 2.5, True, "x", [], [1], {}, {"a": 1}):
        for changed in [odd] if line is None else [{**line, key: odd} for key in line]:
            path.write_text(json.dumps(changed) + "\n")
            with contextlib.suppress(TruestepError):
                assert compare(first, tmp_path / "b").text


def test_options_that_cannot_be_read_are_no_difference(run: Callable[..., Path]) -> None:
    first, second = run("a"), run("b", loss={"epsilon_high": 0.01})
    (second / "config.yaml").unlink()
    found = compare(first, second)
    assert (found.step, found.cause) == (1, "numerics")
    assert f"{second / 'config.yaml'} cannot be read, so options were not compared" in found.text
    assert "options are the same" not in found.text and "epsilon" not in found.text
    (second / "metrics.jsonl").unlink()
    assert "all metrics are the same" not in compare(first, second).text


def test_the_commands(run: Callable[..., Path], tmp_path: Path) -> None:
    first = run("a", checkpoint={"every": 1, "keep": 5})
    asked = ["replay", str(first), "--step", "3", "--output", str(tmp_path / "again")]
    made = CliRunner().invoke(main, asked)
    assert made.exit_code == 0 and "step 3 is what it was, bit for bit" in made.output
    assert CliRunner().invoke(main, asked).exit_code == 1, "the directory is not empty"
    same = CliRunner().invoke(main, ["compare", str(first), str(tmp_path / "again")])
    assert same.exit_code == 0 and "1 steps, 3 to 3, are the same" in same.output
    what_if = CliRunner().invoke(main, ["replay", str(first), "--step", "3", "--loss.type", "gspo"])
    assert what_if.exit_code == 0 and "what if: loss.type is gspo (it was grpo)" in what_if.output
    other = CliRunner().invoke(main, ["compare", str(first), str(run("b", loss={"epsilon_low": 0.01}))])
    assert other.exit_code == 1 and "loss.epsilon_low is 0.2 and 0.01" in other.output
    with pytest.raises(TruestepError, match="has no step in its ledger.jsonl"):
        compare(first, tmp_path)
