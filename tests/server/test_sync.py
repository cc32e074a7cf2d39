"""New weights reach the servers, and every document's log-probs are those of the weights that it names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pages import ROOT
from server.conftest import Servers
from server.runs import label_versions, recorded, server_config
from small_runs import read_lines

PROGRAM = ROOT / "tests" / "generate" / "endpoint" / "sorts.py"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # the first test waits for the servers to start


def test_synchronous_training_is_on_policy(servers: Servers, tmp_path: Path) -> None:
    run = recorded(server_config(tmp_path, [servers.first.url]))
    assert run.trainer.run() == "all 4 steps are done"
    for seen, documents in run.steps:
        assert len(documents) == 16
        assert all((label_versions(document) == seen).all() for document in documents)
    assert run.worst_gap() < 1e-4
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["max_staleness"] == 0 and line["clipped_ratio_fraction"] == 0 for line in metrics)
    ids = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert ids == [f"{group}-{member}" for group in range(16) for member in range(4)]


@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_each_token_has_the_version_that_made_it(pause: str, servers: Servers, tmp_path: Path) -> None:
    config = server_config(
        tmp_path,
        [servers.first.url, servers.second.url],
        sampler={"max_staleness": 32, "pause": pause, "max_new_tokens": 60},
        schedule={"steps": 5},
        optimizer={"learning_rate": 3e-3},
    )
    run = recorded(config)
    run.trainer.run()
    assert run.worst_gap() < 1e-4
    mixed = [rollout for rollout in run.taken if len(set(label_versions(rollout).tolist())) > 1]
    assert not mixed or pause == "keep"
    for seen, documents in run.steps:
        assert all(0 <= seen - label_versions(document).min() <= 32 for document in documents)
    staleness = [line["max_staleness"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert staleness[0] == 0 and max(staleness) > 0, "sampling went on beside training"


def test_only_the_newest_weights_stay_on_the_disk(servers: Servers, tmp_path: Path) -> None:
    weights = tmp_path / "shared"
    run = recorded(server_config(tmp_path, [servers.first.url], sampler={"weights_directory": str(weights)}))
    seen: list[int] = []
    push = run.shared.publish

    def counted(version: int) -> None:
        push(version)
        seen.append(len(list(weights.glob("*truestep-weights-*"))))

    run.shared.publish = counted
    run.trainer.run()
    assert seen == [1, 2, 2, 2, 2]
    assert not weights.exists(), "a finished run's weights are in its checkpoint"


def test_a_run_goes_on_where_it_stopped_and_trains_each_document_once(servers: Servers, tmp_path: Path) -> None:
    def part(steps: int) -> list[str]:
        config = server_config(
            tmp_path,
            [servers.first.url],
            sampler={"max_staleness": 16},
            schedule={"steps": steps},
            checkpoint={"every": 1},
        )
        run = recorded(config)
        run.trainer.run()
        assert run.worst_gap() < 1e-4
        return [rollout.id for rollout in run.taken]

    ids = [*part(2), *part(5)]
    ledger = [name for line in read_lines(tmp_path / "run" / "ledger.jsonl") for name in line["documents"]]
    assert ledger == ids and len(set(ids)) == 5 * 16
    groups = {int(name.split("-")[0]) for name in ids}
    assert groups <= set(range(24)), "what was under way at the stop is made again, and no prompt is passed over"


@pytest.mark.parametrize("max_staleness", [0, 32])
def test_episodes_of_several_turns_have_the_log_probs_of_their_weights(
    max_staleness: int, servers: Servers, tmp_path: Path
) -> None:
    config = server_config(
        tmp_path,
        [servers.first.url, servers.second.url],
        sampler={
            "reward": None,
            "environment": {"class": "turn_environments:Sorting"},
            "max_new_tokens": 60,
            "max_episode_tokens": 300,
            "max_staleness": max_staleness,
        },
        optimizer={"learning_rate": 1e-3},
    )
    run = recorded(config)
    assert run.trainer.run() == "all 4 steps are done"
    assert [len(documents) for _, documents in run.steps] == [16] * 4
    assert run.worst_gap() < 1e-4
    turns = [sum(turn.role == "assistant" for turn in document.turns) for document in run.taken]
    assert max(turns) == 3, "an episode has up to three turns of the policy"
    assert {document.rewards.get("order") is not None for document in run.taken} >= {True}


def test_programs_have_the_log_probs_of_their_weights(servers: Servers, tmp_path: Path) -> None:
    config = server_config(
        tmp_path,
        [servers.first.url, servers.second.url],
        sampler={
            "reward": None,
            "environment": {"type": "command", "run": [sys.executable, str(PROGRAM), "without stops", "{prompt}"]},
            "max_new_tokens": 20,
            "max_episode_tokens": 300,
            "max_staleness": 32,
        },
        optimizer={"learning_rate": 1e-3},
    )
    run = recorded(config)
    assert run.trainer.run() == "all 4 steps are done"
    assert [len(documents) for _, documents in run.steps] == [16] * 4
    assert run.worst_gap() < 1e-4
    assert {sum(turn.role == "assistant" for turn in document.turns) for document in run.taken} == {2}
