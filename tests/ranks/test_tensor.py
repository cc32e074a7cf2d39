"""One step over tensor ranks is the step of one process: loss, metrics, gradients and scores against the oracle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oracles.step import oracle_logprobs, oracle_step
from ranks.cases import on_ranks, score_all, train_all, train_and_keep
from ranks.test_layouts import Layout, Model, gradient_error, loss_of, make_case, options, read
from ranks.test_train_over_ranks import check_same_run, config, optimizer_of, weights_of
from scoring import check_against_oracle, write_records
from selection import long_except
from small_runs import write_rollouts
from tiny import make_model, make_records, set_old_logprobs
from truestep.head import logits
from truestep.head.vocab_parallel import VocabularyShard
from truestep.ranks.axes import RankError
from truestep.ranks.launch import run_ranks
from truestep.tools.export import export


def tensor(ranks: int, **parallel: Any) -> Layout:
    return {"tensor": ranks, **parallel}, 1, 40


BESIDE_DATA: list[Layout] = [
    ({"tensor": 2}, 1, 40),
    ({"tensor": 2}, 2, 24),
    ({"tensor": 2, "data_replicate": 2}, 1, 40),
    ({"tensor": 2, "reduce_each_micro_batch": True, "reshard_after_forward": False}, 1, 30),
]


@pytest.mark.long
def test_beside_shards_and_replicas(tiny_model: Model, tmp_path: Path) -> None:
    """Two data ranks of two tensor ranks; a slice is sharded on, and the tied head's gradient is reduced by hand."""
    loss = loss_of("gspo")
    model, rollouts, records = make_case("qwen3_tied", loss, tiny_model, tmp_path)
    configs = [options(model, rollouts, loss, layout) for layout in BESIDE_DATA]
    recomputed = configs[0] | {"model": {**configs[0]["model"], "activation_checkpointing": True}}
    runs = [(config, str(tmp_path / str(number))) for number, config in enumerate([*configs, recomputed])]
    on_ranks(4, score_all, runs)
    oracle = oracle_step(model, records, configs[0])
    for _, output in runs:
        check_against_oracle(read(Path(output)), oracle)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "traits"),
    [
        ("qwen3_tied", {"num_key_value_heads": 1}),
        # Three query heads a rank, four to a key head: no rank's share them evenly but the first and the last.
        ("llama", {"hidden_size": 24, "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("qwen2", {"num_key_value_heads": 1, "vocab_size": 62}),
    ],
)
def test_key_heads_that_ranks_do_not_divide_and_biases(kind: str, traits: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", kind, **traits)
    records = make_records(11, documents=13)
    set_old_logprobs(records, oracle_logprobs(model, records))
    rollouts = write_records(tmp_path / "rollouts.jsonl", records)
    given = options(model, rollouts, loss_of("grpo"), tensor(4))
    on_ranks(4, score_all, [(given, str(tmp_path / "out"))])
    check_against_oracle(read(tmp_path / "out"), oracle_step(model, records, given))


@pytest.mark.long
def test_half_precision_is_no_further_off_than_one_process(tiny_model: Model, tmp_path: Path) -> None:
    """Over four ranks; over two: verify/test_half_precision.py."""
    loss = loss_of("grpo")
    model, rollouts, records = make_case("qwen3_tied", loss, tiny_model, tmp_path)
    exact = options(model, rollouts, loss, tensor(1))
    oracle = oracle_step(model, records, exact)
    head = {"fp32_lm_head": True}

    def half(parallel: dict[str, Any]) -> dict[str, Any]:
        return exact | {"model": {**exact["model"], "dtype": "bfloat16", "head": head}, "parallel": parallel}

    for size, parallel in ((1, {}), (4, {"tensor": 4})):
        on_ranks(size, score_all, [(half(parallel), str(tmp_path / str(size)))])

    one, four = (gradient_error(tmp_path / str(size), oracle) for size in (1, 4))
    assert 1e-4 < four <= 1.5 * one


@pytest.mark.parametrize(
    ("dtype", "tensor_ranks"), long_except([("float32", 4), ("bfloat16", 4), ("float32", 2)], ("bfloat16", 4))
)
def test_what_ranks_share_stays_the_same_to_the_last_bit(
    dtype: str, tensor_ranks: int, tiny_model: Model, tmp_path: Path
) -> None:
    """Norms, and key projections of fewer heads than ranks, after steps that clip and decay; also a shard of them."""
    write_rollouts(tmp_path / "rollouts.jsonl", 21)
    given = config(
        tiny_model("qwen3_tied"),
        tmp_path / "rollouts.jsonl",
        tmp_path / "run",
        optimizer={"learning_rate": 1e-2, "weight_decay": 0.1, "gradient_clip": 0.1},
        parallel={"tensor": tensor_ranks},
    )
    given["model"]["dtype"] = dtype
    on_ranks(4, train_and_keep, given, str(tmp_path))
    kept = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    shared = [name for name, cut in kept[0]["cut"].items() if not cut]
    projections = {"k_proj", "v_proj"} if tensor_ranks == 4 else set()
    assert {name.split(".")[-2] for name in shared} >= projections | {"q_norm", "k_norm", "input_layernorm", "norm"}
    begun = load_file(tiny_model("qwen3_tied") / "model.safetensors")
    for start in range(0, 4, tensor_ranks):
        first, *others = kept[start : start + tensor_ranks]
        for name in shared:
            mine = first["master"][name]
            assert len(mine) < len(begun[name]) or not torch.equal(mine, begun[name]), f"{name} was never updated"
            for other in others:
                assert torch.equal(mine, other["master"][name]), name
                assert torch.equal(first["gradients"][name], other["gradients"][name]), name


@pytest.mark.long
def test_a_run_its_checkpoints_and_its_export_are_those_of_one_process(tiny_model: Model, tmp_path: Path) -> None:
    """Two of its steps on one process, begun and ended on tensor ranks; every file that a run leaves."""
    write_rollouts(tmp_path / "rollouts.jsonl", 31)
    model, moved, still = tiny_model("llama"), tmp_path / "moved", tmp_path / "still"
    rollouts, size = tmp_path / "rollouts.jsonl", 2
    parallel = {"tensor": size}
    on_ranks(size, train_all, [config(model, rollouts, moved, parallel=parallel, schedule={"steps": 2})])
    on_ranks(1, train_all, [config(model, rollouts, moved, schedule={"steps": 4})])
    on_ranks(size, train_all, [config(model, rollouts, moved, parallel=parallel)])
    on_ranks(1, train_all, [config(model, rollouts, still)])
    check_same_run(moved, still)
    for read_files in (weights_of, optimizer_of):
        mine, theirs = read_files(moved), read_files(still)
        assert {name: value.shape for name, value in mine.items()} == {n: value.shape for n, value in theirs.items()}
    for name, value in optimizer_of(still).items():
        assert (optimizer_of(moved)[name] - value).norm() <= 1e-4 * value.norm(), name
    for run in (moved, still):
        export(run, run / "exported", "bfloat16")
    names = sorted(file.name for file in (still / "exported").iterdir())
    assert sorted(file.name for file in (moved / "exported").iterdir()) == names
    assert (moved / "exported" / "config.json").read_text() == (still / "exported" / "config.json").read_text()


def score_with_little_memory_on_one_rank(runs: list[tuple[dict[str, Any], str]]) -> None:
    """Room for three rows of logits there, and for all of them on the others."""
    if os.environ["RANK"] == "1":
        logits._free_bytes = lambda device: 3 * 4 * 31
    agreed = VocabularyShard.least

    def checked(self: VocabularyShard, value: int, device: torch.device) -> int:
        chosen = agreed(self, value, device)
        assert chosen <= value, "more rows than there is room for"
        return chosen

    VocabularyShard.least = checked  # type: ignore[method-assign]
    score_all(runs)


@pytest.mark.parametrize("loss", long_except(["grpo", "gspo"], "gspo"))
def test_ranks_with_other_free_memory_agree_on_their_chunks(loss: str, tiny_model: Model, tmp_path: Path) -> None:
    """Each chunk is an exchange: ranks with another number of them would wait for ever, or mix rows up. Chunks of three
    rows also cut documents in two, whose ratio gspo then needs before."""
    model, rollouts, records = make_case("gemma2", loss_of(loss), tiny_model, tmp_path)
    given = options(model, rollouts, loss_of(loss), tensor(2))
    on_ranks(2, score_with_little_memory_on_one_rank, [(given, str(tmp_path / "out"))])
    check_against_oracle(read(tmp_path / "out"), oracle_step(model, records, given))


@pytest.mark.long
def test_the_fused_kernels_serve_a_slice_of_the_vocabulary(tiny_model: Model, tmp_path: Path) -> None:
    """Interpreted, where there is no GPU."""
    loss = loss_of("grpo")
    model, rollouts, records = make_case("gemma2", loss, tiny_model, tmp_path)
    given = options(model, rollouts, loss, tensor(2))
    given["model"]["head"] = {"logits_chunk_size": 16}
    run_ranks(2, score_all, [[(given, str(tmp_path / "out"))]], environment={"TRITON_INTERPRET": "1"}, timeout=280)
    check_against_oracle(read(tmp_path / "out"), oracle_step(model, records, given))


def test_what_cannot_be_cut_says_so_on_every_rank(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", hidden_size=24, num_attention_heads=6)
    rollouts = write_records(tmp_path / "rollouts.jsonl", make_records(11, documents=3))
    given = options(model, rollouts, loss_of("grpo"), tensor(4))
    with pytest.raises(
        RankError, match="parallel.tensor: num_attention_heads is 6, which 4 tensor ranks do not divide"
    ):
        on_ranks(4, score_all, [(given, str(tmp_path / "out"))])
