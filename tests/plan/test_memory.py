"""The plan's arithmetic, held against peaks that were measured on GPUs and against a run's own tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from plan.shapes import ADAPTED_BIG, ADAPTED_BIGGER, BIG, MIDDLE, SMALL, THIRD, WIDER, config_of
from ranks.cases import on_ranks, train_and_keep
from small_runs import file_config, quiet_trainer, write_rollouts
from tiny import make_model
from truestep.config.schema import Config
from truestep.plan.advice import layout_of, savings
from truestep.plan.memory import (
    ACTIVATIONS,
    AT_ONCE,
    GIB,
    GRADIENTS,
    MASTERS,
    MOVING,
    REFERENCE,
    STATES,
    UNREDUCED,
    WEIGHTS,
    plan_memory,
)
from truestep.plan.shape import ModelShape, read_shape, shape_of

# What was measured (benchmarks/RESULTS.md, its history): the model, options, ranks, and the peak of each stage in GiB.
RECOMPUTED = {"activation_checkpointing": True, "chunk": 2048}
FITS = {"tokens": 16384, "compile": True, "activation_checkpointing": True}
FLASH = {"tokens": 16384, "compile": True, "attention": "flash", "activation_checkpointing": "elementwise"}
MEASURED: list[tuple[ModelShape, dict[str, Any], int, list[float]]] = [
    (SMALL, {"tokens": 16384}, 1, [45.8]),
    (SMALL, {"tokens": 16384, "compile": True}, 1, [34.7]),
    (SMALL, FITS, 1, [13.4]),
    (MIDDLE, {"tokens": 14900, "compile": True}, 1, [63.3]),  # 256 documents of 640 tokens, dealt out evenly
    (MIDDLE, {"tokens": 12288}, 1, [69.1]),  # 128 of 384
    (MIDDLE, {"tokens": 16384, **RECOMPUTED}, 2, [22.18]),
    (MIDDLE, {"tokens": 16384, **RECOMPUTED}, 4, [17.36]),
    (MIDDLE, {"tokens": 17384, "several": False, **RECOMPUTED}, 4, [11.3]),
    (MIDDLE, {"tokens": 17384, "context": 4, **RECOMPUTED}, 4, [15.2]),
    (MIDDLE, {"tokens": 17384, "tensor": 4, **RECOMPUTED}, 4, [8.9]),
    (MIDDLE, {"tokens": 17384, "pipeline": 4, **RECOMPUTED}, 4, [16.9, 12.1, 11.4, 9.7]),
    (MIDDLE, {"tokens": 35000, "context": 2, **RECOMPUTED}, 2, [22.5]),
    (MIDDLE, {"tokens": 35000, "tensor": 2, **RECOMPUTED}, 2, [19.1]),
    (MIDDLE, {"tokens": 32768, "several": False, "chunk": 2048}, 2, [113.5]),
    (MIDDLE, {"tokens": 32768, "several": False, "chunk": 2048, "context": 2}, 2, [71.4]),
    (MIDDLE, {"tokens": 65536, "several": False, "chunk": 2048, "context": 2}, 2, [123.4]),
    (BIG, {**FITS, "optimizer": {"type": "adamw_8bit"}}, 1, [99.4]),
    (BIG, {**FITS, "optimizer": {"offload": "all"}}, 1, [54.8]),
    (BIG, {**FITS, "optimizer": {"offload": "all", "offload_room": 45}}, 1, [93.7]),
    (BIG, {**FITS, "optimizer": {"type": "adamw_8bit", "offload": "all", "offload_room": 16}}, 1, [64.7]),
    (MIDDLE, {**FITS, "activation_checkpointing": False}, 1, [63.4]),
    (MIDDLE, {**FITS, "activation_checkpointing": False, "optimizer": {"offload": "states"}}, 1, [50.6]),
    (MIDDLE, {**FITS, "activation_checkpointing": False, "optimizer": {"offload": "all"}}, 1, [44.2]),
    (MIDDLE, {**FITS, "activation_checkpointing": False, "optimizer": {"type": "adamw_8bit"}}, 1, [53.9]),
    (MIDDLE, {**FLASH, "activation_checkpointing": False}, 1, [61.8]),
    (MIDDLE, FLASH, 1, [50.6]),
    (MIDDLE, {**FLASH, "chunk": 4096}, 1, [49.4]),
    (MIDDLE, {**FLASH, "tokens": 14900}, 1, [51.1]),  # 256 documents of 640 tokens, dealt out evenly
    (WIDER, FLASH, 1, [97.4]),
    (THIRD, FITS, 1, [50.3]),
    (THIRD, {**FITS, "optimizer": {"offload": "states"}}, 1, [29.9]),
    (THIRD, {**FITS, "optimizer": {"offload": "all"}}, 1, [19.7]),
    (THIRD, {**FITS, "optimizer": {"offload": "states", "offload_room": 12}}, 1, [40.3]),
    (THIRD, {**FITS, "optimizer": {"offload": "all", "offload_room": 12}}, 1, [30.2]),
    (THIRD, {**FITS, "optimizer": {"offload": "all", "offload_room": 24}}, 1, [42.2]),
    (THIRD, {**FITS, "optimizer": {"type": "adamw_8bit"}}, 1, [35.1]),
    (THIRD, {**FITS, "optimizer": {"type": "adamw_8bit", "offload": "all"}}, 1, [19.7]),
    (ADAPTED_BIG, FITS, 1, [25.4]),
    (ADAPTED_BIGGER, FITS, 1, [81.9]),
]


@pytest.mark.parametrize(("shape", "options", "ranks", "measured"), MEASURED)
def test_planned_peaks_are_within_a_tenth_of_measured_ones(
    shape: ModelShape, options: dict[str, Any], ranks: int, measured: list[float]
) -> None:
    config = config_of(**options)
    planned = plan_memory(config, shape, layout_of(config, ranks))
    assert [rank.total / GIB for rank in planned] == [pytest.approx(peak, rel=0.10) for peak in measured]


def test_what_a_weight_takes_by_hand() -> None:
    """1,720,574,976 weights on one rank: 4 + 4 + 8 bytes in float32, and 2 as they compute."""
    (rank,) = plan_memory(config_of(16384), MIDDLE, layout_of(config_of(16384), 1))
    assert MIDDLE.total == 1_720_574_976
    assert {kind: rank.kinds[kind] / MIDDLE.total for kind in (MASTERS, WEIGHTS, GRADIENTS, STATES)} == {
        MASTERS: 4, WEIGHTS: 2, GRADIENTS: 4, STATES: 8,
    }  # fmt: skip
    assert UNREDUCED not in rank.kinds and REFERENCE not in rank.kinds
    # 8,192 rows of logits of 2 bytes, and their hidden states (bfloat16) and gradients (float32).
    assert rank.kinds[AT_ONCE] == 8192 * 151936 * 2 + 8192 * 2048 * 6
    halved = plan_memory(config_of(8192), MIDDLE, layout_of(config_of(8192), 1))[0]
    assert halved.kinds[ACTIVATIONS] == rank.kinds[ACTIVATIONS] / 2


def test_a_reference_that_is_offloaded_takes_nothing_at_the_peak() -> None:
    """2 bytes a weight, but for the time of its own pass, which is less than what a step's own passes keep."""
    loss = {"type": "grpo", "kl_reference": {"weight": 0.1}}
    config = Config.model_validate(config_of(16384).model_dump(exclude_unset=True) | {"loss": loss})
    layout = layout_of(config, 1)
    (here,) = plan_memory(config, MIDDLE, layout)
    assert here.kinds[REFERENCE] == 2 * MIDDLE.total
    (away,) = plan_memory(config.changed({"loss.kl_reference.offload": True}), MIDDLE, layout)
    assert away.kinds[REFERENCE] == 0.0
    assert here.total - away.total == 2 * MIDDLE.total
    options = [saving.option for saving in savings(config, MIDDLE, layout)]
    assert "--loss.kl_reference.offload true" in options


LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"pipeline": 2}),
    (2, {"context": 2}),
    (4, {"tensor": 2, "data_shard": 2}),
]


@pytest.mark.parametrize(
    ("size", "parallel"), [(1, {}), *(pytest.param(*layout, marks=pytest.mark.long) for layout in LAYOUTS)]
)
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_weights_gradients_and_their_ranks_are_those_of_a_run(
    size: int, parallel: dict[str, int], kind: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", kind)
    write_rollouts(tmp_path / "rollouts.jsonl", 8)
    given = {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(tmp_path / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 8, "steps": 1, "stall_timeout": 30},
        "parallel": parallel,
        "checkpoint": {"directory": str(tmp_path / "run"), "every": 0},
        "logging": {"console": False},
    }
    config = Config.model_validate(given)
    if size == 1:
        trainer = quiet_trainer(config)
        trainer.run()
        masters = [sum(part.nbytes for part in trainer.policy.weights.master.values())]
        states = sum(part.nbytes for state in trainer.optimizer.state.values() for part in state.values() if part.dim())
    else:
        on_ranks(size, train_and_keep, given, str(tmp_path))
        kept = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]
        masters = [sum(part.nbytes for part in one["master"].values()) for one in kept]
        states = None
    layout = layout_of(config, size)
    planned = plan_memory(config, read_shape(config), layout)
    for rank, found in enumerate(masters):
        stage = planned[layout.places(rank)["pipeline"]]
        # A matrix whose rows ranks do not divide gives one of them a row more.
        assert found == pytest.approx(stage.kinds[MASTERS], rel=0.02 if size == 1 else 0.1)
    if states is not None:
        assert states == planned[0].kinds[STATES] and masters[0] == planned[0].kinds[MASTERS]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_each_optimizers_state_is_that_of_a_run(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", intermediate_size=5120)
    write_rollouts(tmp_path / "rollouts.jsonl", 8)
    optimizer = {"optimizer": {"type": kind}, "schedule": {"docs_per_step": 8, "steps": 1}}
    config = file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **optimizer)
    trainer = quiet_trainer(config)
    trainer.run()
    states = sum(part.nbytes for state in trainer.optimizer.state.values() for part in state.values() if part.dim())
    (planned,) = plan_memory(config, read_shape(config), layout_of(config, 1))
    assert planned.kinds[STATES] == pytest.approx(states, rel=1e-12)
    offloaded = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"offload": "states"})})
    assert plan_memory(offloaded, read_shape(config), layout_of(config, 1))[0].kinds[STATES] == 0


def test_what_lies_on_the_host_is_off_the_device_by_hand() -> None:
    """18 bytes a weight become 10 and 6; of two ranks each has half of the model's own copy besides what it gathers."""
    given = config_of(16384).model_dump(exclude_unset=True)
    kinds = (MASTERS, WEIGHTS, GRADIENTS, STATES)
    for offload, wanted in (("none", 18), ("states", 10), ("all", 6)):
        config = Config.model_validate(given | {"optimizer": {"offload": offload}})
        (rank,) = plan_memory(config, MIDDLE, layout_of(config, 1))
        assert sum(rank.kinds[kind] for kind in kinds) == wanted * MIDDLE.total
    roomy = {"optimizer": {"offload": "states", "offload_room": 1000}}
    (rank,) = plan_memory(Config.model_validate(given | roomy), MIDDLE, layout_of(config, 1))
    assert rank.kinds[MOVING] == 8 * MIDDLE.total, "no more than there is"
    roomy = {"optimizer": {"offload": "all", "offload_room": 4}, "parallel": {"pipeline": 4}}
    config = Config.model_validate(given | roomy)
    first, middle, *_ = (stage.kinds.get(MOVING, 0) / GIB for stage in plan_memory(config, BIG, layout_of(config, 4)))
    embedding, layer = 8 * 151_936 * 4096 / GIB, 8 * 4096 * 12288 / GIB
    assert (first, middle) == pytest.approx((max(0, 4 - embedding), 4 - layer)), "the largest weight of each stage"
    both = [Config.model_validate(given | {"optimizer": {"offload": offload}}) for offload in ("states", "all")]
    states, everything = (plan_memory(config, MIDDLE, layout_of(config, 2))[0].kinds for config in both)
    assert everything[MASTERS] == 0 and everything[WEIGHTS] - states[WEIGHTS] == 2 * MIDDLE.total / 2


def test_bytes_of_a_weight_by_hand() -> None:
    """In 8 bits a number takes two bytes and two scales for each block: of 128 in rows of 2,048, of 192 in 6,144."""
    shape, layout = MIDDLE, layout_of(config_of(1024), 1)
    given = config_of(1024).model_dump(exclude_unset=True)
    found = {}
    for kind in ("adamw", "adamw_8bit", "muon"):
        config = Config.model_validate(given | {"optimizer": {"type": kind}})
        found[kind] = plan_memory(config, shape, layout)[0].kinds[STATES] / shape.total
    assert found["adamw"] == 8
    assert 2.03 < found["adamw_8bit"] < 2.07
    ends = 151936 * 2048
    assert found["muon"] == pytest.approx(4 + 4 * ends / shape.total, rel=1e-3)


def test_options_that_help_say_what_they_save() -> None:
    config = config_of(16384)
    layout = layout_of(config, 1)
    found = {saving.option: saving.saved for saving in savings(config, MIDDLE, layout)}
    assert next(iter(found)) == "--model.activation_checkpointing full"
    before = plan_memory(config, MIDDLE, layout)[0].total
    after = plan_memory(config_of(16384, activation_checkpointing=True), MIDDLE, layout)[0].total
    assert found["--model.activation_checkpointing full"] == before - after
    assert "--parallel.reduce_each_micro_batch true" not in found, "one rank reduces nothing"


def test_a_mixture_of_experts_is_planned_too() -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        shape = shape_of(transformers.AutoModelForCausalLM.from_config(config))
    (rank,) = plan_memory(config_of(1024), shape, layout_of(config_of(1024), 1))
    assert rank.kinds[MASTERS] == 4 * shape.total and rank.kinds[ACTIVATIONS] > 0


ADAPTER_LAYOUTS: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {"tensor": 2})]


@pytest.mark.long
@pytest.mark.parametrize(("size", "parallel"), ADAPTER_LAYOUTS)
def test_an_adapters_masters_and_states_are_those_of_a_run(size: int, parallel: dict[str, int], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    write_rollouts(tmp_path / "rollouts.jsonl", 8)
    sections = {"adapter": {"rank": 8}, "parallel": parallel, "schedule": {"docs_per_step": 8, "steps": 1}}
    config = file_config(model, tmp_path / "rollouts.jsonl", tmp_path / "run", **sections)
    on_ranks(size, train_and_keep, config.model_dump(exclude_unset=True), str(tmp_path))
    kept = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(size)]
    layout = layout_of(config, size)
    planned = plan_memory(config, read_shape(config), layout)
    for rank, one in enumerate(kept):
        stage = planned[layout.places(rank)["pipeline"]]
        assert sum(part.nbytes for part in one["master"].values()) == stage.kinds[MASTERS]
        assert sum(part.nbytes for part in one["gradients"].values()) == stage.kinds[GRADIENTS]
        assert stage.kinds[STATES] == 2 * stage.kinds[MASTERS]


def test_an_adapter_by_hand(tmp_path: Path) -> None:
    """The base has 2 bytes a weight and the adapter 18; a reference that is the base costs nothing."""
    model = make_model(tmp_path / "model", "llama")
    given = config_of(1024).model_dump(exclude_unset=True)
    given["model"] |= {"path": str(model)}
    plain = read_shape(Config.model_validate(given))
    config = Config.model_validate(given | {"adapter": {"rank": 8, "targets": ["q_proj", "down_proj"]}})
    shape = read_shape(config)
    adapter = 2 * 8 * ((32 + 32) + (48 + 32))  # two layers
    assert shape.total == plain.total + adapter and len(shape.weights) == len(plain.weights) + 8
    (rank,) = plan_memory(config, shape, layout_of(config, 1))
    assert {kind: rank.kinds[kind] for kind in (MASTERS, WEIGHTS, GRADIENTS, STATES)} == {
        MASTERS: 4 * adapter, WEIGHTS: 2 * shape.total, GRADIENTS: 4 * adapter, STATES: 8 * adapter,
    }  # fmt: skip
    reference = Config.model_validate(
        given | {"adapter": {"rank": 8}, "loss": {"type": "grpo", "kl_reference": {"weight": 0.1}}}
    )
    assert REFERENCE not in plan_memory(reference, read_shape(reference), layout_of(reference, 1))[0].kinds
    # A frozen layer's products keep no input; an adapter keeps its own, and what lies between its two matrices.
    before = plan_memory(Config.model_validate(given), plain, layout_of(config, 1))[0].kinds[ACTIVATIONS]
    assert rank.kinds[ACTIVATIONS] < before
