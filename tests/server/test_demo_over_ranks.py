"""The demo's task through a real server from a trainer on two ranks: accurate, and every log-prob the policy's own."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.cases import on_ranks
from server.conftest import Servers
from server.demo_over_ranks import TAKEN, train_until_accurate
from server.demo_runs import DOCUMENTS, ENOUGH, on_servers, warm_up
from server.models import make_model
from server.runs import label_versions, score
from small_runs import read_lines
from truestep.head.logits import HeadSettings
from truestep.model.loading.load import load_policy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),  # the first test waits for the servers to start
    pytest.mark.skipif("TRUESTEP_WHOLE_DEMO" not in os.environ, reason="many minutes: set TRUESTEP_WHOLE_DEMO"),
]


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's task, and the policy that has imitated its corpus."""
    folder = tmp_path_factory.mktemp("demo")
    policy = warm_up(make_model(folder / "model", seed=0, spread=0.0), folder)
    (folder / "policy").symlink_to(policy)
    return folder


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["sharded", "tensor", "pipeline"])
def test_the_demo_trains_over_ranks_through_a_server(
    parallel: dict[str, int], servers: Servers, warmed_up: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "parallel": parallel,
        "sampler": {"weights_directory": str(tmp_path / "weights")},
        "schedule": {"stall_timeout": 300},
        "evaluation": {"servers": True},
        "checkpoint": {"directory": str(tmp_path / "grpo")},
    }
    config = on_servers(warmed_up / "policy", warmed_up, servers.first.url, **changes)
    given = config.model_dump(mode="json", exclude_unset=True)
    on_ranks(2, train_until_accurate, given, str(tmp_path), timeout=1400)

    evaluations = read_lines(tmp_path / "grpo" / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.5
    assert evaluations[-1]["sampled_reward"] >= ENOUGH
    steps = pickle.loads((tmp_path / TAKEN).read_bytes())
    print(f"{parallel}: {len(steps)} steps, held-out {evaluations[-1]['sampled_reward']}, gap {worst_gap(tmp_path)}")
    assert worst_gap(tmp_path) < 1e-4, "every label, by the weights of the version that it names"
    metrics = read_lines(tmp_path / "grpo" / "metrics.jsonl")
    assert all(line["max_staleness"] <= DOCUMENTS for line in metrics)
    assert sum(line["max_staleness"] > 0 for line in metrics) > len(metrics) / 2, "sampling went on beside training"


def worst_gap(folder: Path) -> float:
    """Find the largest difference between a label's log-prob and that of the published weights that it names."""
    taken = [rollout for _, documents in pickle.loads((folder / TAKEN).read_bytes()) for rollout in documents]
    published = {int(path.name.split("-")[2]): path for path in (folder / "weights").glob("truestep-weights-*")}
    worst, named = 0.0, {int(version) for rollout in taken for version in label_versions(rollout)}
    assert named <= set(published)
    for version in named:
        policy = load_policy(published[version], head=HeadSettings(fp32=True))
        touched = [rollout for rollout in taken if (label_versions(rollout) == version).any()]
        for rollout, logprobs in zip(touched, score(policy, touched), strict=True):
            assert rollout.logprobs is not None
            own = label_versions(rollout) == version
            worst = max(worst, float(np.abs(logprobs - rollout.logprobs[rollout.loss_mask])[own].max()))
    return worst
