"""A step through the stages of a pipeline is the step of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from oracles.step import oracle_logprobs, oracle_step
from ranks.cases import on_ranks, score_all, train_all, train_and_do
from ranks.test_layouts import gradient_error, loss_of, options, read
from ranks.test_train_over_ranks import check_same_run, config, optimizer_of, weights_of
from scoring import check_against_oracle, write_records
from selection import in_tiers
from small_runs import read_lines, write_rollouts
from tiny import make_model, make_records, set_old_logprobs
from truestep.config.schema import Config
from truestep.ranks.axes import RankError
from truestep.ranks.launch import start_ranks
from truestep.tools.score import score


def make_case(kind: str, loss: dict[str, Any], directory: Path, layers: int = 4) -> tuple[Path, Path, list[dict]]:
    """Ratios on both sides of both bounds, and as many layers as stages."""
    model = directory / kind
    if not model.exists():
        make_model(model, kind, num_hidden_layers=layers)
    records = make_records(11, documents=13)
    level = "document" if loss["type"] == "gspo" else "label"
    bounds = (1 - loss.get("epsilon_low", 0.2), 1 + loss.get("epsilon_high", 0.2))
    set_old_logprobs(records, oracle_logprobs(model, records), level=level, bounds=bounds)
    return model, write_records(directory / f"{kind}-{loss['type']}.jsonl", records), records


@pytest.mark.long
def test_steps_of_other_numbers_of_micro_batches_and_checkpoints_that_move(tmp_path: Path) -> None:
    """Two steps through four ranks, two through two stages each of two, two over data as well, the rest on one rank."""
    write_rollouts(tmp_path / "rollouts.jsonl", 60)
    model, moved, still = (
        make_model(tmp_path / "model", "qwen3_tied", num_hidden_layers=4),
        tmp_path / "moved",
        tmp_path / "still",
    )
    for size, steps, parallel in (
        (4, 2, {"pipeline": 4}),
        (2, 4, {"pipeline": 2, "stages_per_rank": 2}),
        (4, 6, {"pipeline": 2}),
        (1, None, {}),
    ):
        given = config(model, tmp_path / "rollouts.jsonl", moved, parallel=parallel, schedule={"steps": steps})
        on_ranks(size, train_all, [given])
        if size > 1:
            check_files_are_those_of_one_process(moved, model)
    on_ranks(1, train_all, [config(model, tmp_path / "rollouts.jsonl", still)])
    check_same_run(moved, still)
    numbers = {line["num_micro_batches"] for line in read_lines(still / "metrics.jsonl")}
    assert len(numbers) > 1, "schedules of one length only"
    mine, theirs = optimizer_of(moved), optimizer_of(still)
    assert set(mine) == set(theirs)
    for name, value in theirs.items():
        assert (mine[name] - value).norm() <= 1e-4 * value.norm(), name


def test_a_ring_of_three_ranks_with_two_stages_each(tmp_path: Path) -> None:
    """What the last rank gives goes to the first one; three does not divide the number of micro-batches."""
    loss = loss_of("grpo")
    model, rollouts, records = make_case("qwen3_tied", loss, tmp_path, layers=6)
    parallel = {"pipeline": 3, "stages_per_rank": 2}
    runs = [(options(model, rollouts, loss, (parallel, 1, budget)), str(tmp_path / str(budget))) for budget in (24, 64)]
    on_ranks(3, score_all, runs)
    oracle = oracle_step(model, records, options(model, rollouts, loss, ({}, 1, 64)))
    numbers = set()
    for _, output in runs:
        scored = read(Path(output))
        numbers.add(scored.step["num_micro_batches"] % 3)
        check_against_oracle(scored, oracle)
    assert numbers - {0}


def check_files_are_those_of_one_process(run: Path, model: Path) -> None:
    mine, theirs = weights_of(run), load_file(model / "model.safetensors")
    assert {name: value.shape for name, value in mine.items()} == {name: v.shape for name, v in theirs.items()}
    latest = sorted((run / "checkpoints").glob("step-*"))[-1]
    before, after = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (model, latest))
    assert {name: after.get(name) for name in before} == before
    assert not (latest / "model.safetensors.index.json").exists()


@pytest.mark.long
def test_half_precision_is_no_further_off_than_one_process(tmp_path: Path) -> None:
    """In bfloat16 a layout's error against float64 is at most 1.5 times the one process's."""
    loss = {"type": "grpo", "metrics": "full"}
    model, rollouts, records = make_case("qwen3_tied", loss, tmp_path)
    plain, staged = (options(model, rollouts, loss, (parallel, 1, 40)) for parallel in ({}, {"pipeline": 2}))
    half = {"model": {**plain["model"], "dtype": "bfloat16", "head": {"fp32_lm_head": True}}}
    on_ranks(2, score_all, [(staged | half, str(tmp_path / "half"))])
    on_ranks(4, score_all, [(staged | half, str(tmp_path / "shards"))])
    on_ranks(1, score_all, [(plain | half, str(tmp_path / "one"))])
    oracle = oracle_step(model, records, plain)
    for name in ("half", "shards"):
        assert 1e-4 < gradient_error(tmp_path / name, oracle) <= 1.5 * gradient_error(tmp_path / "one", oracle)


def test_fewer_documents_than_ranks_and_a_step_without_labels(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=4)
    records = make_records(5, documents=3)[1:]
    set_old_logprobs(records, oracle_logprobs(model, records))
    rollouts = write_records(tmp_path / "few.jsonl", records)
    given = options(model, rollouts, {"type": "grpo", "metrics": "full"}, ({"pipeline": 2}, 1, 64))
    alone = write_records(
        tmp_path / "unlabelled.jsonl", [records[1] | {"loss_mask": [0] * len(records[1]["input_ids"])}]
    )
    nothing = options(model, alone, {"type": "cross_entropy"}, ({"pipeline": 2}, 1, 64))
    on_ranks(4, score_all, [(given, str(tmp_path / "few")), (nothing, str(tmp_path / "none"))])
    check_against_oracle(read(tmp_path / "few"), oracle_step(model, records, given))
    none = read(tmp_path / "none")
    assert none.step["loss"] == 0 and none.step["num_labels"] == 0
    assert all(not gradient.any() for gradient in none.gradients.values())


def test_scores_without_gradients(tmp_path: Path) -> None:
    loss = loss_of("grpo")
    model, rollouts, _ = make_case("llama", loss, tmp_path)
    parallel = {"pipeline": 2, "stages_per_rank": 2}
    runs = [
        (options(model, rollouts, loss, (layout, 1, 30)), str(tmp_path / str(n)))
        for n, layout in enumerate([{}, parallel])
    ]
    on_ranks(1, score_without_gradients, runs[:1])
    on_ranks(2, score_without_gradients, runs[1:])
    one, two = (json.loads((tmp_path / str(n) / "step.json").read_text(encoding="utf-8")) for n in (0, 1))
    assert two == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in one.items()}


def score_without_gradients(runs: list[tuple[dict[str, Any], str]]) -> None:
    for given, output in runs:
        score(Config.model_validate(given), Path(output), gradients=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "expected"),
    in_tiers(
        [("kill", "rank 1 is gone"), ("raise", "rank 1 failed"), ("stall", "rank 1 has made no progress")],
        [],
        [("kill", "rank 1 is gone"), ("stall", "rank 1 has made no progress")],
    ),
)
def test_a_stage_that_is_lost_ends_the_run_by_name(what: str, expected: str, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 40)
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=4)
    given = config(
        model, tmp_path / "rollouts.jsonl", tmp_path / "run", parallel={"pipeline": 3}, schedule={"stall_timeout": 3.0}
    )
    processes, folder, store = start_ranks(3, train_and_do, (given, 1, "computing step 2", what))
    for process in (processes[0], processes[2]):
        process.join(timeout=200)
    processes[1].kill()
    processes[1].join()
    assert all(process.exitcode for process in processes), [process.exitcode for process in processes]
    said = [(folder / str(rank)).read_text(encoding="utf-8") for rank in (0, 2)]
    assert all(expected in words for words in said), said
    assert [line["step"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")] == [1]
    del store


def test_more_stages_than_layers_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    (model / "model.safetensors").write_bytes(b"no weights at all")
    rollouts = write_records(tmp_path / "few.jsonl", make_records(5, documents=3))
    given = options(model, rollouts, {"type": "grpo"}, ({"pipeline": 2, "stages_per_rank": 2}, 1, 64))
    message = r"parallel.pipeline: 2 x parallel.stages_per_rank: 2 makes 4 stages .* the model has 2 layers"
    with pytest.raises(RankError, match=message):
        on_ranks(2, score_all, [(given, str(tmp_path / "out"))])
