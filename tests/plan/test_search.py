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
from truestep.plan.cost import Work, plan_time
from truestep.plan.memory import ACTIVATIONS, GIB, plan_memory
from truestep.plan.search import CHECKPOINTING, OFFLOAD, REDUCE, fastest, settle, settle_on
from truestep.ranks.group import ALONE


def auto(**options: Any) -> Config:
    names = {"activation_checkpointing": "auto", "activation_offload": "auto", **options}
    return Config.model_validate(merged(config_of(16384).model_dump(exclude_unset=True), {"model": names}))


def test_what_is_found_fits_and_is_in_order() -> None:
    config = config_of(16384)
    room = 30 * GIB
    found = fastest(config, MIDDLE, 4, room, H200)
    assert len(found) > 3 and all(way.memory <= room for way in found)
    times = [way.time.total for way in found if way.time]
    assert times == sorted(times)
    assert any(way.layout.by_name["tensor"] > 1 for way in found)
    assert found[0].layout.by_name["tensor"] == 1, "nothing is exchanged within a layer where it need not be"
    for way in found:
        sizes = {f"parallel.{name}": size for name, size in way.layout.by_name.items()}
        changed = config.changed({**sizes, **way.changes})
        assert most_of(changed, MIDDLE, way.layout) == way.memory
        work = Work.of(changed, way.layout.by_name["data_shard"] * way.layout.by_name["data_replicate"])
        assert way.time and plan_time(changed, MIDDLE, way.layout, H200, work).total == pytest.approx(way.time.total)
    assert not fastest(config, BIG, 1, 8 * GIB, H200)


def test_a_way_says_what_is_to_be_written() -> None:
    (first, *_) = fastest(config_of(16384), BIG, 1, 80 * GIB, H200)
    assert first.changes["optimizer.offload"] == "all"
    room = first.changes["optimizer.offload_room"]
    assert f"optimizer: {{offload: all, offload_room: {room}}}" in first.as_yaml() and room >= 1


def test_what_moves_gets_the_memory_that_is_left() -> None:
    """And a room that is set goes where nothing moves: the two contradict each other."""
    (first, *_) = fastest(config_of(16384), BIG, 1, 80 * GIB, H200)
    without = {**first.changes, "optimizer.offload_room": 0.0}
    layout = layout_of(config_of(16384), 1)
    plain = config_of(16384).changed(without)
    assert first.memory > most_of(plain, BIG, layout) and first.memory > 65 * GIB
    assert first.time and first.time.total < plan_time(plain, BIG, layout, H200, Work.of(plain, 1)).total
    roomy = config_of(16384).changed({"optimizer.offload": "all", "optimizer.offload_room": 8.0})
    (first, *_) = fastest(roomy, MIDDLE, 1, 139 * GIB, H200)
    assert first.changes["optimizer.offload"] == "none" and first.changes["optimizer.offload_room"] == 0.0
    assert roomy.changed(first.changes).optimizer.offload == "none"  # type: ignore[union-attr]


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
    found = fastest(config, MIDDLE, 4, room, None)
    assert found and all(way.time is None and way.memory <= room for way in found)
    within = [way.layout.by_name["tensor"] * way.layout.by_name["context"] for way in found]
    assert within == sorted(within)
