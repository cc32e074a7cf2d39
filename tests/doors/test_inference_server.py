"""A recipe: another kind of inference server, whose wire no file of `src` knows, and a run that samples from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from doors.own_server import Process, serve
from small_runs import merged, quiet_trainer, read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.commands.cli import main
from truestep.config.custom import CustomError
from truestep.generate.errors import ServerError
from truestep.tools.parity.gap import parity

STEPS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return word_model(tmp_path / "model")


def config_of(model: Path, url: str, **sections: Any) -> Any:
    directory = model.parent
    write_lines(directory / "prompts.jsonl", sort_prompts(12))
    base = {
        "sampler": {
            "type": "server",
            "protocol": "doors.own_server:OwnServer",
            "urls": [url],
            "model": "mine",
            "reward_workers": 1,
            "temperature": 0.9,
        },
        "schedule": {"steps": STEPS},
        "data": {"tokens_per_microbatch": 512},
    }
    return sampled_config(model, directory / "prompts.jsonl", directory / "run", **merged(base, sections))


def test_a_run_trains_on_what_a_server_of_its_users_own_samples(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    process = Process(word_model(other), "mine", longest=200)
    with serve(process) as url:
        config = tmp_path / "run.yaml"
        config.write_text(yaml.safe_dump(config_of(model, url).model_dump(mode="json", exclude_unset=True)))
        outcome = CliRunner().invoke(main, ["train", str(config)])
    assert outcome.exit_code == 0, outcome.output
    versions = [int(name.split("-")[2]) for name in process.taken]
    assert versions == [8 * step for step in range(STEPS + 1)], "weights before the first step and after each"
    assert process.done.count("score") >= 3 * len(versions), "three probes of each"
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(metrics) == STEPS
    for line in metrics:
        assert abs(line["ratio_new_old"] - 1) < 1e-4 and line["max_staleness"] == 0
        assert (line["grad_norm"] > 0) == (line["zero_advantage_groups"] < 1), "zero where rewards agree"
    assert metrics[0]["grad_norm"] > 0


def test_parity_asks_it_too(model: Path) -> None:
    with serve(Process(model, "mine", longest=200)) as url:
        result = parity(config_of(model, url), documents=8)
    assert result.fine and result.base.worst < 1e-4, result.verdict


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        ("triton", "sampler.protocol 'triton': write it as package.module:function"),
        ("doors.own_server:Missing", "doors.own_server has no class Missing"),
        ("doors.own_server:serve", "sampler.protocol.url: serve has no such option"),
    ],
)
def test_a_class_that_is_not_there_is_named(protocol: str, said: str, model: Path) -> None:
    with pytest.raises(CustomError, match=said):
        quiet_trainer(config_of(model, "127.0.0.1:9", sampler={"protocol": protocol}))


def test_it_refuses_in_its_own_words(model: Path) -> None:
    process = Process(model, "another", longest=10)
    with serve(process) as url, pytest.raises(ServerError, match="serves another, not mine"):
        quiet_trainer(config_of(model, url))
