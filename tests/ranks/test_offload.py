"""Whole runs with masters and states on the host: bit for bit those without, in bfloat16, under every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest, read_states, read_weights
from ranks.cases import on_ranks, train_all
from selection import in_tiers
from small_runs import file_config, merged, quiet_trainer, read_lines, write_rollouts
from truestep.config.schema import Config
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.weights.sharded import ShardedWeights

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "shards 2": (2, {}),
    "shards 2, reduced each time": (2, {"reduce_each_micro_batch": True, "reshard_after_forward": False}),
    "replicas 2": (2, {"data_replicate": 2, "data_shard": 1}),
    "context 2": (2, {"context": 2}),
    "tensor 2 x shards 2": (4, {"tensor": 2}),
    "replicas 2 x shards 2": (4, {"data_replicate": 2}),
    "pipeline 2 x shards 2": (4, {"pipeline": 2}),
}
SHORT = ("shards 2",)
LONG = ("one process", "tensor 2 x shards 2")


def in_half(config: Config) -> dict[str, Any]:
    return merged(config.model_dump(), {"model": {"dtype": "bfloat16"}})


@pytest.mark.parametrize("name", in_tiers(LAYOUTS, SHORT, LONG))
def test_a_run_in_half_precision_is_the_same_bit_for_bit(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Four steps, of which the last two go on from a checkpoint."""
    size, parallel = LAYOUTS[name]
    model = tiny_model("qwen3_tied")
    write_rollouts(tmp_path / "rollouts.jsonl", 20)
    configs = []
    for offload in ("none", "all"):
        for steps in (2, 4):
            optimizer = {"type": "adamw", "offload": offload, "weight_decay": 0.1}
            given = file_config(
                model, tmp_path / "rollouts.jsonl", tmp_path / offload, optimizer=optimizer, parallel=parallel,
                schedule={"steps": steps, "breadth_first_micro_batches": 2}, checkpoint={"every": 2},
            )  # fmt: skip
            configs.append(in_half(given))
    on_ranks(size, train_all, configs)
    first, second = (latest(tmp_path / offload) for offload in ("none", "all"))
    for read in (read_weights, read_states):
        plain, offloaded = read(first), read(second)
        assert plain.keys() == offloaded.keys()
        assert all(torch.equal(plain[key], value) for key, value in offloaded.items())
    plain_lines, lines = (read_lines(tmp_path / offload / "metrics.jsonl") for offload in ("none", "all"))
    assert [line["grad_norm"] for line in plain_lines] == [line["grad_norm"] for line in lines]
    assert len(lines) == 4 and len({line["loss"] for line in lines}) == 4


def check_places(given: dict[str, Any]) -> None:
    """Look at what each rank keeps: masters and states apart from the model, and no float32 shard."""
    config = Config.model_validate(given)
    ranks = join_ranks(config)
    weights = make_policy(config, ranks).weights
    assert isinstance(weights, ShardedWeights) and weights.masters_on_host
    for name, part in weights._sharded.items():
        assert part.to_local().untyped_storage().size() == 0, name
        copy = weights._computed[name]
        assert copy.dtype == torch.bfloat16 and copy.shape == weights.master[name].shape
        assert torch.equal(copy, weights.master[name].to(torch.bfloat16))
        assert weights.master[name].grad is None


def test_no_float32_shard_stays_where_the_model_is(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    sections: dict[str, Any] = {"optimizer": {"offload": "all"}}
    given = file_config(tiny_model("qwen3"), tmp_path / "none.jsonl", tmp_path / "run", **sections)
    on_ranks(2, check_places, in_half(given))


def test_masters_of_one_process_are_apart_from_the_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 5)
    sections: dict[str, Any] = {"optimizer": {"offload": "all"}, "schedule": {"steps": 1}}
    given = file_config(tiny_model("qwen3"), tmp_path / "rollouts.jsonl", tmp_path / "run", **sections)
    trainer = quiet_trainer(given)
    trainer.run()
    weights, own = trainer.policy.weights, dict(trainer.policy.model.named_parameters())
    for name, master in weights.master.items():
        assert master.untyped_storage().data_ptr() != own[name].untyped_storage().data_ptr()
        assert torch.equal(master, own[name]), "the update was published, rows by rows"
        assert master.grad is None and weights.gradients[name].abs().sum() > 0
