"""Runs on servers, and the proof of what they trained on: every document, scored by the weights that it names."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.models import make_model
from server.vllm_server import NAME
from small_runs import merged, quiet_trainer, sampled_config, write_lines
from truestep.config.schema import Config
from truestep.environments import sorting
from truestep.generate.servers.shared import SharedServers
from truestep.losses.label_losses import CrossEntropy
from truestep.losses.objective import Denominator, Objective
from truestep.model.policy import Policy
from truestep.rollouts.source import Taken
from truestep.run.trainer import Trainer
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import Rollout


def write_prompts(path: Path, count: int, shortest: int = 3, longest: int = 40, seed: int = 0) -> Path:
    generator = random.Random(seed)
    lengths = [generator.randint(shortest, longest) for _ in range(count)]
    return write_lines(path, [{"prompt": " ".join(generator.choices(sorting.WORDS, k=length))} for length in lengths])


def server_config(directory: Path, urls: Sequence[str], **sections: Any) -> Config:
    """A few small steps; the trainer's weights are not those that the servers were started with."""
    model = directory / "model"
    if not model.exists():
        make_model(model, seed=1)
    prompts = directory / "prompts.jsonl"
    if not prompts.exists():
        write_prompts(prompts, 30)
    base = {
        "data": {"group_size": 4, "tokens_per_microbatch": 2048},
        "schedule": {"docs_per_step": 16, "steps": 4, "stall_timeout": 60},
        "sampler": {
            "type": "server",
            "urls": list(urls),
            "model": NAME,
            "reward": "server.rewards:word_reward",
            "reward_workers": 1,
            "temperature": 0.8,
            "max_new_tokens": 16,
        },
        "loss": {"metrics": "full"},
        "checkpoint": {"every": 0},
    }
    return sampled_config(model, prompts, directory / "run", **merged(base, sections))


@dataclass
class Recorder:
    """Beside a trainer: every document that it takes, and the weights of every version."""

    trainer: Trainer
    taken: list[Rollout] = field(default_factory=list)
    steps: list[tuple[int, list[Rollout]]] = field(default_factory=list)  # documents seen before it, its documents
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source: Any = self.trainer.source
        self.shared: Any = self.trainer.observers.of(SharedServers)
        take, push = source.take, self.shared.publish

        def recorded_take(count: int, documents_seen: int) -> Taken:
            taken = take(count, documents_seen)
            self.taken += taken.documents
            self.steps.append((documents_seen, list(taken.documents)))
            return taken

        def recorded_push(version: int) -> None:
            self.weights[version] = copy.deepcopy(self.trainer.policy.model.state_dict())
            push(version)

        source.take, self.shared.publish = recorded_take, recorded_push

    def worst_gap(self) -> float:
        """Between the sampler's log-prob of any label and that of the weights whose version the label has."""
        policy = self.trainer.policy
        now = copy.deepcopy(policy.model.state_dict())
        worst = 0.0
        for version, weights in self.weights.items():
            touched = [rollout for rollout in self.taken if (label_versions(rollout) == version).any()]
            policy.model.load_state_dict(weights)
            for rollout, logprobs in zip(touched, score(policy, touched), strict=True):
                assert rollout.logprobs is not None
                mine = label_versions(rollout) == version
                gaps = np.abs(logprobs - rollout.logprobs[rollout.loss_mask])[mine]
                worst = max(worst, float(gaps.max()))
        policy.model.load_state_dict(now)
        known = set(self.weights)
        assert all(set(label_versions(rollout).tolist()) <= known for rollout in self.taken)
        return worst


def recorded(config: Config) -> Recorder:
    return Recorder(quiet_trainer(config))


def label_versions(rollout: Rollout) -> np.ndarray:
    assert rollout.model_version is not None
    return rollout.model_version[rollout.loss_mask]


def completion(rollout: Rollout) -> list[int]:
    return rollout.input_ids[rollout.loss_mask].tolist()


def score(policy: Policy, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Of each label, as training scores it."""
    if not rollouts:
        return []
    runner = StepRunner(policy, Objective(CrossEntropy(), Denominator("labels", None)), "none", keep_scores=True)
    together = [range(start, min(start + 64, len(rollouts))) for start in range(0, len(rollouts), 64)]
    plan = make_plan(rollouts, together, 0)
    return [document.logprobs for document in runner.accumulate(plan, backward=False).scores]
