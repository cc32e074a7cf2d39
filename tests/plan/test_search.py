"""What fits, and what `auto` becomes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plan.shapes import BIG, H200, MIDDLE, SLOW, config_of
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from truestep.config.schema import Config
from truestep.plan import search
from truestep.plan.advice import layout_of, most_of
from truestep.plan.cost import plan_time
from truestep.plan.memory import ACTIVATIONS, GIB, plan_memory
from truestep.plan.search import CHECKPOINTING, OFFLOAD, REDUCE, first_that_fits, settle, settle_on
from truestep.ranks.group import ALONE


def auto(**options: Any) -> Config:
    names = {"activation_checkpointing": "auto", "activation_offload": "auto", **options}
    return Config.model_validate(merged(config_of(16384).model_dump(exclude_unset=True), {"model": names}))


def test_what_is_found_fits_and_is_the_first() -> None:
    config, layout = config_of(16384), layout_of(config_of(16384), 1)
    plenty = first_that_fits(config, MIDDLE, layout, 139 * GIB)
    assert plenty is not None and plenty.changes == {}
    way = first_that_fits(config, MIDDLE, layout, 30 * GIB)
    assert way is not None and way.memory <= 30 * GIB and way.changes["optimizer.offload"] == "states"
    assert most_of(config.changed(way.changes), MIDDLE, layout) == way.memory
    assert "optimizer: {offload: states}" in way.as_yaml()
    tight = first_that_fits(config, BIG, layout, 65 * GIB)
    assert tight is not None and tight.changes["optimizer.offload"] == "all" and tight.memory <= 65 * GIB
    assert first_that_fits(config, BIG, layout, 8 * GIB) is None


@pytest.mark.parametrize(
    ("room", "wanted"),
    [(139, False), (60, "elementwise"), (45, "selective"), (38, "full")],
)
def test_auto_recomputes_as_little_as_fits(room: float, wanted: Any) -> None:
    config, switched_on = settle(auto(activation_offload=False), MIDDLE, layout_of(auto(), 1), room * GIB, H200)
    assert config.model.activation_checkpointing == wanted
    assert switched_on == ({CHECKPOINTING: wanted} if wanted else {})


def test_activations_go_to_the_host_where_nothing_else_fits() -> None:
    layout = layout_of(auto(), 1)
    full = auto(activation_checkpointing="full")
    without = most_of(full.changed({OFFLOAD: False}), MIDDLE, layout)
    assert settle(auto(), MIDDLE, layout, without, H200)[1] == {CHECKPOINTING: "full"}
    config, switched_on = settle(auto(), MIDDLE, layout, without - GIB, H200)
    assert switched_on == {CHECKPOINTING: "full", OFFLOAD: True}
    kept = plan_memory(config, MIDDLE, layout)[0].kinds[ACTIVATIONS]
    assert kept == 16384 * 2048 * 2 * 3, "two layers' inputs and the embedded tokens"


def test_gradients_are_reduced_each_time_where_they_do_not_fit_whole() -> None:
    config = config_of(16384, activation_checkpointing="full")
    layout = layout_of(config, 2)
    whole = most_of(config.changed({REDUCE: False}), MIDDLE, layout)
    assert settle(config, MIDDLE, layout, whole - GIB, H200)[1] == {REDUCE: True}
    assert settle(config, MIDDLE, layout, whole, SLOW)[1] == {}, "a slow bus: they are reduced once"


def test_recomputation_in_part_lies_between() -> None:
    layout = layout_of(config_of(16384), 1)
    peaks, times = [], []
    for how in (False, "elementwise", "selective", "full"):
        config = config_of(16384, activation_checkpointing=how)
        peaks.append(most_of(config, MIDDLE, layout))
        times.append(plan_time(config, MIDDLE, layout, H200).total)
    assert peaks == sorted(peaks, reverse=True) and times == sorted(times)
    by_hand = 28 * 16384 * (16 * 128 * 2 + 16 * 4 + (2048 + 1024 + 1024 + 2048) * 2)
    config = config_of(16384, activation_checkpointing="selective")
    kept = plan_memory(config, MIDDLE, layout)[0].kinds[ACTIVATIONS]
    full = plan_memory(config_of(16384, activation_checkpointing="full"), MIDDLE, layout)[0].kinds[ACTIVATIONS]
    assert kept - full == by_hand


def test_every_rank_chooses_for_the_smallest_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BIG.config.save_pretrained(tmp_path)
    config = auto(path=str(tmp_path), activation_offload=False)
    assert settle_on(config, ALONE, H200) == (config, {}), "no GPU is here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(search, "device_memory", lambda: 200 * GIB)
    settled, switched_on = settle_on(config, ALONE, None)
    assert switched_on == {CHECKPOINTING: "selective"}
    assert settled.model.activation_checkpointing == "selective"
    assert settle_on(config.changed({"model.device": "cpu"}), ALONE, H200)[1] == {}
    plain = config.changed({CHECKPOINTING: False, REDUCE: True})
    assert settle_on(plain, ALONE, H200) == (plain, {}), "nothing says auto"


def test_a_run_on_a_cpu_takes_auto_for_false(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 5)
    given = file_config(tiny_model("qwen3"), tmp_path / "rollouts.jsonl", tmp_path / "run", schedule={"steps": 1})
    config = given.changed({CHECKPOINTING: "auto", OFFLOAD: "auto", REDUCE: "auto"})
    trainer = quiet_trainer(config)
    trainer.run()
    assert trainer.step == 1 and trainer.policy.activations_on_host is None


def test_activations_go_to_the_host_only_where_layers_are_recomputed() -> None:
    with pytest.raises(ValueError, match="set model.activation_checkpointing too"):
        Config.model_validate({"model": {"path": "none", "activation_offload": True}, "data": {"path": "none"}})
    true = Config.model_validate({"model": {"path": "none", "activation_checkpointing": True}, "data": {"path": "n"}})
    assert true.model.activation_checkpointing == "full"


def test_without_rates_the_ladder_alone_decides() -> None:
    """What is recomputed counts first, then how gradients are reduced; a slow link is not known to be one."""
    config = auto(activation_checkpointing="auto", compile=True)
    config, layout = config.changed({"data.tokens_per_microbatch": 8192}), layout_of(config, 4)
    room = 0.94 * 23.5 * GIB
    assert settle(config, MIDDLE, layout, room, None)[1] == {CHECKPOINTING: "elementwise", REDUCE: True}
    assert settle(config, MIDDLE, layout, room, SLOW)[1] == {CHECKPOINTING: "selective"}
