"""`train` on 1, 2 and 4 ranks: one ledger, one set of weights, and checkpoints that move between layouts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_states, read_weights
from ranks.cases import on_ranks, train_all
from sequences import in_documents
from small_runs import (
    kept_rows,
    merged,
    read_lines,
    sort_prompts,
    without_times,
    word_model,
    write_lines,
    write_rollouts,
)
from tiny import make_records
from truestep.metrics.spent import of_the_machine

Model = Callable[[str], Path]
OF_THE_LAYOUT = ("num_micro_batches",)  # by its nature


def config(model: Path, rollouts: Path | str, run: Path, **sections: Any) -> dict[str, Any]:
    base = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(rollouts), "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 7, "stall_timeout": 30},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(run), "every": 2},
        "logging": {"console": False},
    }
    return merged(base, sections)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return read_weights(latest(run))


def optimizer_of(run: Path) -> dict[str, torch.Tensor]:
    return read_states(latest(run))


def check_same_run(run: Path, reference: Path) -> None:
    assert read_lines(run / "ledger.jsonl") == read_lines(reference / "ledger.jsonl")
    theirs = read_lines(reference / "metrics.jsonl")
    for mine, line in zip(read_lines(run / "metrics.jsonl"), theirs, strict=True):
        compared = {name for name in line if not of_the_machine(name)}
        assert {name for name in mine if not of_the_machine(name)} == compared
        for name in compared - set(OF_THE_LAYOUT):
            assert mine[name] == pytest.approx(line[name], rel=1e-4, abs=1e-6), (line["step"], name)
    kept = [kept_rows(one) for one in (run, reference)]
    for row, other in zip(*kept, strict=True):
        for name, value in other.items():
            numbers = name.startswith("token_") or isinstance(value, float)
            assert row[name] == (
                value
                if not numbers or value is None or name == "token_texts"
                else pytest.approx(value, rel=1e-4, abs=1e-5)
            ), name
    for name, weight in weights_of(reference).items():
        # Adam's update of a weight whose gradient is all but 0 has the sign of rounding: hence not relative to weights.
        difference = (weights_of(run)[name] - weight).norm() / weight.norm()
        assert difference < 1e-5, name


def test_seven_documents_a_step_on_1_2_and_4_ranks(tiny_model: Model, tmp_path: Path) -> None:
    """Of one, two and three sequences."""
    write_lines(tmp_path / "rollouts.jsonl", in_documents(write_rollouts(tmp_path / "alone.jsonl", 62), (2, 1, 3)))
    model = tiny_model("qwen3_tied")
    for size in (1, 2, 4):
        on_ranks(size, train_all, [config(model, tmp_path / "rollouts.jsonl", tmp_path / f"on{size}")])
    ledger = read_lines(tmp_path / "on4" / "ledger.jsonl")
    assert [line["num_documents"] for line in ledger] == [7, 7, 7, 7, 3]
    assert [len(line["documents"]) for line in ledger] == [7, 7, 7, 7, 3]
    sizes = sorted(len(names) for line in ledger for names in line["records"].values())
    assert sizes == [2] * 11 + [3] * 10
    for size in (2, 4):
        check_same_run(tmp_path / f"on{size}", tmp_path / "on1")


@pytest.mark.long
def test_ranks_share_one_table_of_a_large_file(tiny_model: Model, tmp_path: Path) -> None:
    """A field that nobody reads makes the file large; both ranks go on from a checkpoint, too."""
    records = write_rollouts(tmp_path / "small.jsonl", 31)
    write_lines(tmp_path / "large.jsonl", [record | {"unread": "x" * 600_000} for record in records])
    model, tables = tiny_model("llama"), tmp_path / "tables"
    data = {"cache_directory": str(tables), "shuffle": True}
    for steps in (2, None):
        given = config(model, tmp_path / "large.jsonl", tmp_path / "on2", data=data, schedule={"steps": steps})
        on_ranks(2, train_all, [given])
    given = config(model, tmp_path / "small.jsonl", tmp_path / "on1", data={"shuffle": True})
    on_ranks(1, train_all, [given])
    check_same_run(tmp_path / "on2", tmp_path / "on1")
    assert len(list(tables.glob("*/facts.json"))) == 1


@pytest.mark.long
def test_two_updates_of_a_batch_over_a_change_of_ranks(tiny_model: Model, tmp_path: Path) -> None:
    """The batch whose second update is still to come travels with the checkpoint, and is packed anew."""
    write_rollouts(tmp_path / "rollouts.jsonl", 21)
    model, schedule = tiny_model("llama"), {"updates_per_batch": 2}
    given = config(model, tmp_path / "rollouts.jsonl", tmp_path / "moved", schedule=schedule | {"steps": 3})
    on_ranks(4, train_all, [given])
    on_ranks(2, train_all, [config(model, tmp_path / "rollouts.jsonl", tmp_path / "moved", schedule=schedule)])
    on_ranks(1, train_all, [config(model, tmp_path / "rollouts.jsonl", tmp_path / "still", schedule=schedule)])
    check_same_run(tmp_path / "moved", tmp_path / "still")


@pytest.mark.long
@pytest.mark.parametrize("overshoot", ["carry", "keep"])
def test_parts_of_0_1_37_and_500_documents(overshoot: str, tiny_model: Model, tmp_path: Path) -> None:
    """Each rank sees its own part only; they end mid-step, at different times."""
    sizes = (0, 1, 37, 500)
    names = []
    for rank, size in enumerate(sizes):
        records = make_records(rank, documents=size, max_length=8)
        names.append([record["id"] for record in records])
        write_lines(tmp_path / f"part-{rank}.jsonl", records)
    given = config(
        tiny_model("llama"),
        tmp_path / "part-{rank}.jsonl",
        tmp_path / "run",
        schedule={"docs_per_step": 67, "overshoot": overshoot},
        data={"tokens_per_microbatch": 128},
        checkpoint={"every": 0},
    )
    on_ranks(4, train_all, [given])
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    trained = [name for line in ledger for name in line["documents"]]
    assert sorted(trained) == sorted(name for part in names for name in part), "none lost, none doubled"
    counts = [line["num_documents"] for line in ledger]
    if overshoot == "carry":
        assert counts == [67] * 8 + [2]
    else:
        assert all(count >= 67 for count in counts[:-1]) and len(set(counts)) > 1
    assert trained[:4] == [names[1][0], names[2][0], names[3][0], names[2][1]], "the one global order"


def test_a_part_that_goes_on_after_a_restart(tiny_model: Model, tmp_path: Path) -> None:
    for rank, size in enumerate((11, 30)):
        write_lines(tmp_path / f"part-{rank}.jsonl", make_records(rank, documents=size))
    parts = tmp_path / "part-{rank}.jsonl"
    for steps in (3, None):
        on_ranks(2, train_all, [config(tiny_model("llama"), parts, tmp_path / "run", schedule={"steps": steps})])
    on_ranks(2, train_all, [config(tiny_model("llama"), parts, tmp_path / "still")])
    check_same_run(tmp_path / "run", tmp_path / "still")
    assert sum(line["num_documents"] for line in read_lines(tmp_path / "run" / "ledger.jsonl")) == 41


@pytest.mark.long
def test_many_runs_of_random_shape(tiny_model: Model, tmp_path: Path) -> None:
    """Twelve of them, over 2, 3 and 4 ranks: whole files or parts, either overshoot, targets that divide nothing."""
    draw = random.Random(8)
    expected: dict[Path, list[str]] = {}
    runs: dict[int, list[dict[str, Any]]] = {2: [], 3: [], 4: []}
    for number in range(12):
        size = (2, 3, 4)[number % 3]
        parted = draw.random() < 0.5
        names = []
        for part in range(size if parted else 1):
            records = make_records(100 * number + part, documents=draw.choice((0, 1, 3, 9, 14)) + (part == 0))
            names += [record["id"] for record in records]
            write_lines(tmp_path / f"{number}-{part}.jsonl", records)
        run = tmp_path / f"run-{number}"
        shards = draw.choice([shards for shards in (1, 2, size) if size % shards == 0])
        given = config(
            tiny_model("llama"),
            tmp_path / (f"{number}-{{rank}}.jsonl" if parted else f"{number}-0.jsonl"),
            run,
            schedule={
                "docs_per_step": draw.randint(1, 17),
                "overshoot": draw.choice(("carry", "keep")),
                "breadth_first_micro_batches": draw.randint(1, 2),
            },
            data={"tokens_per_microbatch": draw.choice((24, 40, 200))},
            parallel={"data_shard": shards, "data_replicate": size // shards},
            checkpoint={"every": 0},
        )
        runs[size].append(given)
        expected[run] = names
    for size, configs in runs.items():
        on_ranks(size, train_all, configs)
        for given in configs:
            run, wanted = Path(given["checkpoint"]["directory"]), given["schedule"]["docs_per_step"]
            ledger = read_lines(run / "ledger.jsonl")
            assert sorted(n for line in ledger for n in line["documents"]) == sorted(expected[run]), given
            if given["schedule"]["overshoot"] == "carry":
                assert all(line["num_documents"] == wanted for line in ledger[:-1]), given


@pytest.mark.long
def test_sampling_and_evaluation_are_shared_out(tmp_path: Path) -> None:
    """Prompts are spread over the ranks; documents, rewards, order and evaluations are those of one process."""
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(7))
    model = word_model(tmp_path / "model")

    def given(run: str) -> dict[str, Any]:
        base = config(model, "unused", tmp_path / run, checkpoint={"every": 0})
        base["data"] = {"group_size": 4, "tokens_per_microbatch": 64}
        sampler = {"prompts": str(prompts), "reward": "plain_rewards:digit_reward", "max_new_tokens": 6}
        evaluation = {"prompts": str(prompts), "every": 2}
        schedule = {"docs_per_step": 12, "steps": 4, "stall_timeout": 30}
        # Of seeds 0 to 4 four differ by 2e-6 at most. Seed 0 has weights whose gradient is all but 0 (1.1e-5 on 4).
        return base | {"sampler": sampler, "evaluation": evaluation, "schedule": schedule, "seed": 1}

    for size in (1, 4):
        on_ranks(size, train_all, [given(f"on{size}")])
    check_same_run(tmp_path / "on4", tmp_path / "on1")
    mine, theirs = (without_times(read_lines(tmp_path / run / "evaluation.jsonl")) for run in ("on4", "on1"))
    assert [line["greedy_reward"] for line in mine] == [line["greedy_reward"] for line in theirs]
    assert [line["examples"] for line in mine] == [line["examples"] for line in theirs]
