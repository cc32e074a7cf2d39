"""The demo's task through real servers, asynchronously: as accurate as in process, every log-prob the policy's own."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.conftest import Servers
from server.models import make_model
from server.runs import Recorder, label_versions
from server.vllm_server import NAME
from small_runs import merged, quiet_trainer, read_lines
from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.run.trainer import Trainer
from truestep.tools.demo import run as demo

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]  # the first test waits for the servers to start

STEPS, DOCUMENTS = 100, 256
ENOUGH = 0.95


def test_the_demo_trains_through_a_server_to_its_accuracy(servers: Servers, tmp_path: Path) -> None:
    base = make_model(tmp_path / "model", seed=0, spread=0.0)
    demo._write_task(tmp_path, base, 0)
    quiet = {"logging": {"console": False}}
    warm_up, rewarded = demo.PHASES
    warm = quiet_trainer(_changed(demo.phase_config(warm_up, base, tmp_path, 0), quiet))
    warm.run()
    policy = warm.checkpoints.latest()
    assert policy is not None
    changes: dict[str, Any] = {
        "sampler": {
            "type": "server",
            "urls": [servers.first.url],
            "model": NAME,
            "max_staleness": DOCUMENTS,
            "reward_workers": 1,
        },
        "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS},
        "evaluation": {"every": 10},
    }
    in_process = demo.phase_config(rewarded, policy, tmp_path, 0).model_dump()
    for name in set(in_process["sampler"]) - (set(ServerSampler.model_fields) - {"type"}):
        del in_process["sampler"][name]  # an option of sampling in process alone
    run = Recorder(quiet_trainer(Config.model_validate(merged(in_process, changes | quiet))))
    run.trainer.sinks.append(_StopWhenAccurate(run.trainer))
    run.trainer.run()

    evaluations = read_lines(tmp_path / "grpo" / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.5
    assert evaluations[-1]["sampled_reward"] > ENOUGH
    assert run.worst_gap() < 1e-4, "every label, by the weights of the version that it names"
    fresh = [seen for seen, documents in run.steps if all((label_versions(one) == seen).all() for one in documents)]
    assert fresh[0] == 0
    metrics = read_lines(tmp_path / "grpo" / "metrics.jsonl")
    assert all(line["max_staleness"] <= DOCUMENTS for line in metrics)
    assert sum(line["max_staleness"] > 0 for line in metrics) > len(metrics) / 2, "sampling went on beside training"
    for line in metrics:
        if line["documents_seen"] - line["num_documents"] in fresh:
            assert line["clipped_ratio_fraction"] == 0 and abs(line["ratio_new_old"] - 1) < 1e-4


@dataclass
class _StopWhenAccurate:
    """As a signal would: what is shown needs no more steps."""

    trainer: Trainer

    def step(self, line: dict[str, Any]) -> None:
        pass

    def evaluation(self, line: dict[str, Any]) -> None:
        if line["sampled_reward"] > ENOUGH:
            self.trainer.ask_to_stop(signal.SIGTERM)

    def close(self) -> None:
        pass


def _changed(config: Config, changes: dict[str, Any]) -> Config:
    return Config.model_validate(merged(config.model_dump(), changes))
