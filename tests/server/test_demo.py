"""The demo's task through real servers, asynchronously: as accurate as in process, every log-prob the policy's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.conftest import Servers
from server.demo_runs import DOCUMENTS, ENOUGH, StopWhenAccurate, on_servers, warm_up
from server.models import make_model
from server.runs import Recorder, label_versions
from small_runs import quiet_trainer, read_lines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # the first test waits for the servers to start


def test_the_demo_trains_through_a_server_to_its_accuracy(servers: Servers, tmp_path: Path) -> None:
    policy = warm_up(make_model(tmp_path / "model", seed=0, spread=0.0), tmp_path)
    run = Recorder(quiet_trainer(on_servers(policy, tmp_path, servers.first.url)))
    run.trainer.sinks.append(StopWhenAccurate(run.trainer))
    run.trainer.run()

    evaluations = read_lines(tmp_path / "grpo" / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.5
    assert evaluations[-1]["sampled_reward"] >= ENOUGH
    assert run.worst_gap() < 1e-4, "every label, by the weights of the version that it names"
    fresh = [seen for seen, documents in run.steps if all((label_versions(one) == seen).all() for one in documents)]
    assert fresh[0] == 0
    metrics = read_lines(tmp_path / "grpo" / "metrics.jsonl")
    assert all(line["max_staleness"] <= DOCUMENTS for line in metrics)
    assert sum(line["max_staleness"] > 0 for line in metrics) > len(metrics) / 2, "sampling went on beside training"
    for line in metrics:
        if line["documents_seen"] - line["num_documents"] in fresh:
            assert line["clipped_ratio_fraction"] == 0 and abs(line["ratio_new_old"] - 1) < 1e-4
