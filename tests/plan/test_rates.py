"""Rates are measured once, kept whole or not at all, and the same on every rank."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from plan.shapes import H200, config_of
from ranks.cases import on_ranks
from small_runs import file_config, write_rollouts
from truestep.plan import rates
from truestep.plan.rates import Rates, measure_here, rates_file, rates_here
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import ALONE, join
from truestep.run.assemble.step import make_rule
from truestep.run.train import make_trainer, measured_rates


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return rates_file("a test", 1)


def measured(number: float = 1.0) -> tuple[Rates | None, list[str]]:
    notes: list[str] = []
    return rates_here(ALONE, notes, lambda: dataclasses.replace(H200, copy=number)), notes


def test_they_are_measured_once_and_kept(cache: Path) -> None:
    first, notes = measured(1.0)
    assert first and first.copy == 1.0
    assert notes == [f"the rates of this machine were measured, and are kept in {cache}"]
    again, notes = measured(2.0)
    assert again == first and notes == []
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "no unfinished file is left"
    assert "torch" in cache.name and rates_file("a test", 8) != cache


@pytest.mark.parametrize("content", ["", "{", "null", '{"card": "x"}', "negative", "not finite", b"\xff"])
def test_a_damaged_file_is_measured_again(content: Any, cache: Path) -> None:
    measured(1.0)
    broken = {"negative": {"copy": -1.0}, "not finite": {"copy": float("inf")}}.get(content)
    if broken:
        content = json.dumps(dataclasses.asdict(H200) | broken)
    cache.write_bytes(content if isinstance(content, bytes) else content.encode())
    again, notes = measured(2.0)
    assert again and again.copy == 2.0 and "is damaged" in notes[0] and "are kept in" in notes[1]
    assert measured(3.0) == (again, [])


def test_where_nothing_can_be_kept_each_start_measures(cache: Path) -> None:
    cache.parent.parent.parent.joinpath("truestep").write_text("a file in the place of the directory")
    for number in (1.0, 2.0):
        found, notes = measured(number)
        assert found and found.copy == number and "measured at each start" in notes[-1]


def test_a_card_that_is_full_has_no_rates(cache: Path) -> None:
    def full() -> Rates:
        raise RuntimeError("CUDA out of memory")

    notes: list[str] = []
    assert rates_here(ALONE, notes, full) is None and "could not be measured: CUDA out of memory" in notes[0]
    assert not cache.exists()


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor too, at small sizes: every rate is there, and what is written is read again."""
    monkeypatch.setattr(rates, "_SECONDS", 0.01)
    found = measure_here("cpu")
    values = dataclasses.asdict(found)
    assert all(values[name] > 0 for name in values if name not in ("card", "flash", "link"))
    assert found.flash == 0.0 and found.among(1) == found and found.among(2) is None


def test_attention_costs_what_was_measured() -> None:
    assert H200.attention_slowness("torch") == 2.0 and H200.attention_slowness("auto") == 1.0
    nearly = dataclasses.replace(H200, attention=H200.attention * 1.05)
    assert nearly.attention_slowness("torch") == H200.attention_slowness("torch")


def test_a_deterministic_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[measured_rates.__module__], "rates_here", lambda ranks, notes: H200)
    config = config_of(1024)
    assert measured_rates(config, ALONE, []) == H200
    assert measured_rates(config.changed({"deterministic": True}), ALONE, []) is None
    assert measured_rates(config.changed({"model.device": "cpu"}), ALONE, []) is None


def test_a_run_balances_by_them(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", 5)
    config = file_config(tiny_model("qwen3"), tmp_path / "rollouts.jsonl", tmp_path / "run", schedule={"steps": 1})
    slow = dataclasses.replace(H200, attention=H200.products / 4)
    lengths = {
        name: make_rule(config, make_trainer(config, Console(quiet=True), rates=found).policy).even_length
        for name, found in {"none": None, "fast": H200, "slow": slow}.items()
    }
    assert lengths["fast"] == pytest.approx(2.5 * lengths["none"], rel=1e-12), "FlashAttention 4 serves `auto`"
    assert lengths["slow"] == lengths["fast"]
    torch_alone = config.changed({"model.attention": "torch"})
    policy = make_trainer(torch_alone, Console(quiet=True), rates=slow).policy
    assert make_rule(torch_alone, policy).even_length == pytest.approx(lengths["none"] * 2.5 / 4)


def _differently(folder: str) -> None:
    ranks = join(RankLayout(), device="cpu", stall_timeout=60.0)
    notes: list[str] = []
    found = rates_here(ranks, notes, lambda: dataclasses.replace(H200, copy=1.0 + ranks.rank))
    assert found is not None
    Path(folder, f"{ranks.rank}.json").write_text(json.dumps(dataclasses.asdict(found)))


def test_every_rank_has_those_of_the_first(tmp_path: Path) -> None:
    on_ranks(2, _differently, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["copy"] == 1.0 and first["link"] > 0
