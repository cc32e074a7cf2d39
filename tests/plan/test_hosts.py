"""Plans of several machines: which exchanges cross them, what they cost, and what is said of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from plan.shapes import BIG, H200, config_of
from truestep.commands.cli import main
from truestep.errors import TruestepError
from truestep.plan import search
from truestep.plan.advice import changed_plainly, layout_of
from truestep.plan.cost import Hosts, Work, exchanges, plan_time
from truestep.plan.rates import rates_file
from truestep.plan.report import hosts_of
from truestep.plan.volumes import Volume
from truestep.ranks.axes import RankLayout

WORK = Work(1_048_576, 524_288, 1024)


@pytest.mark.parametrize(
    ("layout", "axes", "gpus", "crosses"),
    [
        ({"data_shard": 16}, ("data_shard", "context"), 8, True),
        ({"data_shard": 8}, ("data_shard", "context"), 8, False),
        ({"data_shard": 4, "tensor": 4}, ("tensor",), 8, False),
        ({"data_shard": 4, "tensor": 4}, ("data_shard", "context"), 8, True),
        ({"data_shard": 8, "data_replicate": 2}, ("data_shard", "context"), 8, False),
        ({"data_shard": 8, "data_replicate": 2}, ("data_replicate",), 8, True),
        ({"data_shard": 8, "pipeline": 2}, ("pipeline",), 8, True),
        ({"data_shard": 16, "expert": 8}, ("expert",), 8, False),
        ({"data_shard": 16, "expert": 16}, ("expert",), 8, True),
    ],
)
def test_which_exchanges_cross_hosts(layout: dict[str, int], axes: tuple[str, ...], gpus: int, crosses: bool) -> None:
    assert Volume("", axes, 1.0).crosses(RankLayout(**layout), gpus) is crosses


def test_what_crosses_hosts_goes_at_the_rate_of_the_network() -> None:
    config = config_of(16_384, data_shard=8, data_replicate=2)
    layout = layout_of(config, 16)
    (replicas,) = [one for one in exchanges(config, BIG, layout, WORK) if one.axes == ("data_replicate",)]
    alone = plan_time(config, BIG, layout, H200, WORK)
    apart = plan_time(config, BIG, layout, H200, WORK, Hosts(2, 8, 40e9))
    slower = apart.parts["exchange between ranks"] - alone.parts.get("exchange between ranks", 0.0)
    assert slower == pytest.approx(replicas.sent / 40e9 - replicas.sent / H200.link)
    assert {name: seconds for name, seconds in apart.parts.items() if "exchange" not in name} == {
        name: seconds for name, seconds in alone.parts.items() if "exchange" not in name
    }


def test_hosts_of_one_machine_and_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_of(1, 8) is None and hosts_of(2, 8, 45.0) == Hosts(2, 8, 45e9)
    unknown = hosts_of(2, 8)
    assert unknown is not None and unknown.network is None, "no run on two hosts was measured here"
    with pytest.raises(TruestepError, match="--hosts says how many"):
        hosts_of(1, 8, 45.0)


def test_rates_over_hosts_are_kept_apart() -> None:
    assert rates_file("a card", 16, 8) != rates_file("a card", 16, 16) != rates_file("a card", 8, 8)


def plan(folder: Path, *options: str, fails: int = 0) -> str:
    import json

    import transformers

    if not (folder / "model").exists():
        transformers.Qwen3Config(
            vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        ).save_pretrained(folder / "model")  # fmt: skip
        (folder / "rates.json").write_text(json.dumps(dataclasses.asdict(H200)))
        (folder / "config.yaml").write_text(
            f"model: {{path: {folder / 'model'}}}\ndata: {{path: none, advantages: none, tokens_per_microbatch: 256}}\n"
            "schedule: {docs_per_step: 64}\n"
        )
    words = ["plan", str(folder / "config.yaml"), "--card", str(folder / "rates.json"), *options]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == fails, result.output
    return result.output


def test_a_plan_says_what_was_measured_and_what_was_calculated(tmp_path: Path) -> None:
    said = plan(
        tmp_path, "--gpus", "4", "--hosts", "2", "--network", "45", "--parallel.pipeline", "2", "--length", "100"
    )
    rows = {line.split("  ")[0]: line.split()[-3:] for line in said.splitlines() if " yes " in line or " no " in line}
    assert {name: row[:2] for name, row in rows.items()} == {
        "weights gathered": ["4", "no"],
        "gradients reduced": ["4", "no"],
        "tokens of pipeline stages": ["2", "yes"],
    }
    assert "Given: 45 GB/s of a rank between hosts (--network)" in said
    assert "Measured: the rates of H200, 350 GB/s of its link in a host" in said
    assert "Pipeline stages wait " in said and "a step" in said
    assert "data_shard 4, pipeline 2" in said, "--gpus is of each machine"


def test_without_the_rate_between_hosts_no_time_is_planned(tmp_path: Path) -> None:
    said = plan(tmp_path, "--gpus", "4", "--hosts", "2", "--output", str(tmp_path / "out"))
    assert "the rate between hosts was not measured" in said and "tokens/s" not in said
    assert "weights gathered" in said and "Measured" not in said
    assert '"hosts": 2' in (tmp_path / "out" / "plan.json").read_text()
    assert "between hosts" not in plan(tmp_path, "--gpus", "4")


def test_gpus_of_a_machine_are_those_of_the_launcher_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert "--hosts needs --gpus" in plan(tmp_path, "--hosts", "2", fails=2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "data_shard 8" in plan(tmp_path, "--hosts", "2", "--network", "45")
    assert "data_shard 8" in plan(tmp_path)


def test_options_are_chosen_by_the_time_over_the_network() -> None:
    """Gradients that go over a slow network are reduced once in a step, where its memory lets them."""
    config = config_of(16_384, data_shard=16, reduce_each_micro_batch="auto", activation_checkpointing="auto")
    layout, asked = layout_of(config, 16), list[Hosts | None]()
    honest = search.plan_time

    def planned(*arguments: Any, hosts: Hosts | None = None) -> Any:
        asked.append(hosts)
        return honest(*arguments, hosts=hosts)

    apart = Hosts(2, 8, 1e9)
    with mock.patch.object(search, "plan_time", planned):
        found, _ = search.settle(config, BIG, layout, 139 * 2**30, H200, apart)
    assert len(asked) > 1 and set(asked) == {apart}
    assert plan_time(found, BIG, layout, H200, hosts=apart).total <= min(
        plan_time(changed_plainly(found, search.REDUCE, each), BIG, layout, H200, hosts=apart).total
        for each in (False, True)
    )
