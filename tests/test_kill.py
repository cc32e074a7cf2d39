"""SIGKILL at any instant, a checkpoint's writing included, then a restart: bitwise the run that was never killed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kill_driver import Driver, Kill
from model.test_hybrids import make_hybrid
from small_runs import WORDS, kept_rows
from tiny import VOCABULARY, make_records
from truestep.environments import sorting
from truestep.metrics.spent import of_the_machine
from truestep.tools.demo.model import make_model, make_tokenizer


def _file_config(directory: Path, model: Path, documents: int = 203) -> dict[str, Any]:
    rollouts = directory / "rollouts.jsonl"
    records = [*make_records(1, documents=documents), {"id": "bad", "input_ids": []}]
    rollouts.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "loss": {"type": "gspo", "epsilon_low": 0.1, "epsilon_high": 0.1},
        "data": {"path": str(rollouts), "advantages": "none", "shuffle": True, "epochs": 2},
        "schedule": {"docs_per_step": 5, "updates_per_batch": 2},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3},
        # An odd interval, so that checkpoints fall between the two updates of a batch.
        "checkpoint": {"every": 3, "keep": 2},
    }


def _sampled_config(directory: Path) -> dict[str, Any]:
    prompts = directory / "prompts.jsonl"
    stream = sorting.prompts(0)
    prompts.write_text("".join(json.dumps(next(stream)) + "\n" for _ in range(7)), encoding="utf-8")
    return {
        "model": {"path": str(make_model(directory / "model", sorting.WORDS, 0)), "dtype": "float32"},
        "data": {"group_size": 3, "tokens_per_microbatch": 100},
        "sampler": {"prompts": str(prompts), "reward": "unsteady_reward:reward", "max_new_tokens": 6},
        "evaluation": {"prompts": str(prompts), "every": 4},
        "schedule": {"docs_per_step": 6, "steps": 40},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"every": 2, "keep": 2},
    }


def _episodes_config(directory: Path) -> dict[str, Any]:
    """Episodes of several turns, some of which are begun anew because their environment fails."""
    config = _sampled_config(directory)
    sampler = config["sampler"] | {
        "reward": None,
        "environment": {"class": "turn_environments:Unsteady"},
        "max_episode_tokens": 64,
        "stop": ["=", "1", "2", "3"],
    }
    schedule = config["schedule"] | {"steps": 20}
    return config | {"sampler": sampler, "schedule": schedule, "evaluation": config["evaluation"] | {"stop": ["="]}}


def _curriculum_config(directory: Path) -> dict[str, Any]:
    """Prompts of two sources that rest by rewards which the policy can reach."""
    config = _sampled_config(directory) | {"evaluation": None}
    prompts = {"all": config["sampler"]["prompts"], "few": str(directory / "few.jsonl")}
    lines = Path(prompts["all"]).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(prompts["few"]).write_text("".join(lines[:3]), encoding="utf-8")
    curriculum = {"easy": 1.7, "hopeless": 1.2, "rest": 1}
    sampler = config["sampler"] | {"prompts": prompts, "prompt_weights": {"all": 2, "few": 1}, "curriculum": curriculum}
    return config | {"sampler": sampler, "schedule": config["schedule"] | {"steps": 24}}


def _start(directory: Path, name: str, config: dict[str, Any], kills: list[Kill]) -> Path:
    """The run's directory, after all kills and a last start that was let be."""
    file = directory / f"{name}.yaml"
    run = directory / name
    checkpoint = config["checkpoint"] | {"directory": str(run)}
    file.write_text(yaml.safe_dump(config | {"checkpoint": checkpoint, "deterministic": True}), encoding="utf-8")
    with Driver(file, kills) as driver:
        outcome = driver.wait()
    assert outcome["final"] == 0, driver.log.read_text(encoding="utf-8")[-2000:]
    # Of many kills two may come after the end of a run.
    assert sum(outcome["killed"]) >= len(kills) - 2 * (len(kills) > 4), outcome
    return run


def _result(run: Path) -> dict[str, Any]:
    """All that must be bit for bit the same."""
    last = sorted((run / "checkpoints").iterdir())[-1]
    lines = {
        name: [
            {key: value for key, value in json.loads(line).items() if not of_the_machine(key)}
            for line in (run / name).read_text(encoding="utf-8").splitlines()
        ]
        for name in ("metrics.jsonl", "evaluation.jsonl", "rejected.jsonl")
        if (run / name).is_file()
    }
    return {
        "parts": [file.read_bytes() for file in sorted((last / "truestep").glob("part-*"))],
        "random": [file.read_bytes() for file in sorted((last / "truestep").glob("random-*"))],
        "ledger": (run / "ledger.jsonl").read_bytes(),
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "rollouts": [_without_seconds(row) for row in kept_rows(run)],
        **lines,
    }


def _without_seconds(value: Any) -> Any:
    """A row of a kept rollout without the times of its turns and tools."""
    if isinstance(value, dict):
        return {key: _without_seconds(each) for key, each in value.items() if not key.endswith("seconds")}
    return [_without_seconds(each) for each in value] if isinstance(value, list) else value


def _compare(whole: Path, killed: Path) -> None:
    expected, found = _result(whole), _result(killed)
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, f"{differing} differ from the run that was never killed: first {_first(expected, found)}"


def _first(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """The first line or row that differs, short: a comparison of all bytes would take a test's whole time."""
    for name in ("metrics.jsonl", "rollouts"):
        for number, (one, other) in enumerate(zip(expected[name], found[name], strict=False)):
            if one != other:
                return f"{name} {number}: {[key for key in one if one[key] != other.get(key)]}"
    return "another file"


def test_kills_between_changes_to_the_runs_files_change_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """A few of those that follow, and a shorter run, for `make test`."""
    config = _file_config(tmp_path, tiny_model("qwen3_tied"), documents=43)
    whole = _start(tmp_path, "whole", config, [])
    _compare(whole, _start(tmp_path, "killed", config, [("event", 11), ("event", 26), ("event", 43)]))


@pytest.mark.long
def test_kills_change_nothing_where_states_have_eight_bits_and_lie_on_the_host(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    optimizer = {"type": "adamw_8bit", "offload": "states", "learning_rate": 1e-3}
    config = _file_config(tmp_path, tiny_model("qwen3_tied"), documents=23) | {"optimizer": optimizer}
    whole = _start(tmp_path, "whole", config, [])
    _compare(whole, _start(tmp_path, "killed", config, [("event", 16), ("event", 25)]))


@pytest.mark.long
def test_kills_change_nothing_where_an_adapter_is_trained(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config = _file_config(tmp_path, tiny_model("qwen3_tied"), documents=23) | {"adapter": {"rank": 4}}
    whole = _start(tmp_path, "whole", config, [])
    _compare(whole, _start(tmp_path, "killed", config, [("event", 16), ("event", 25)]))


@pytest.mark.long
def test_kills_change_nothing_where_layers_keep_a_state(tmp_path: Path) -> None:
    model = make_hybrid(tmp_path / "hybrid", "qwen3_5_text")
    assert make_tokenizer(model, WORDS) == VOCABULARY
    config = _sampled_config(tmp_path) | {"evaluation": None}
    config |= {"model": config["model"] | {"path": str(model)}, "schedule": config["schedule"] | {"steps": 8}}
    whole = _start(tmp_path, "whole", config, [])
    _compare(whole, _start(tmp_path, "killed", config, [("event", 11), ("event", 23)]))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["files", "sampled", "episodes", "curriculum"])
def test_a_killed_run_ends_bitwise_like_one_that_was_not(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    kinds = {
        "files": lambda: _file_config(tmp_path, tiny_model("qwen3_tied")),
        "sampled": lambda: _sampled_config(tmp_path),
        "episodes": lambda: _episodes_config(tmp_path),
        "curriculum": lambda: _curriculum_config(tmp_path),
    }
    config = kinds[kind]()
    whole = _start(tmp_path, "whole", config, [])
    generator = random.Random(kind)
    more = kind in ("files", "sampled")
    at_files = [("event", generator.randint(5, 50)) for _ in range(8 if more else 4)]
    at_times = [("seconds", generator.uniform(0.3, 0.8)) for _ in range(4 if more else 2)]
    kills = [*at_files, *at_times]
    generator.shuffle(kills)
    _compare(whole, _start(tmp_path, "killed", config, kills))
