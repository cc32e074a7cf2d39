"""The demo's task on servers: its configurations, and what ends a run that answers well enough."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.vllm_server import NAME
from small_runs import merged, quiet_trainer
from truestep.config.schema import Config
from truestep.run.trainer import Trainer
from truestep.tools.demo import run as demo

STEPS, DOCUMENTS = 100, 256
ENOUGH = 0.95
QUIET = {"logging": {"console": False}}


def warm_up(base: Path, folder: Path, **changes: Any) -> Path:
    """Write the demo's task to a folder, and train a model on its corpus. Return the policy."""
    demo._write_task(folder, base, 0)
    config = demo.phase_config(demo.PHASES[0], base, folder, 0).model_dump(exclude_unset=True)
    trainer = quiet_trainer(Config.model_validate(merged(merged(config, QUIET), changes)))
    trainer.run()
    policy = trainer.checkpoints.latest()
    assert policy is not None
    return policy


def on_servers(policy: Path, folder: Path, url: str, **changes: Any) -> Config:
    """Return the configuration of the demo's second phase with documents from a server, which may be a step ahead."""
    config = demo.phase_config(demo.PHASES[1], policy, folder, 0).model_dump(exclude_unset=True)
    own: dict[str, Any] = {
        "sampler": {
            "type": "server",
            "urls": [url],
            "model": NAME,
            "max_staleness": DOCUMENTS,
            "reward_workers": 1,
        },
        "schedule": {"docs_per_step": DOCUMENTS, "steps": STEPS},
        "evaluation": {"every": 10},
    }
    return Config.model_validate(merged(merged(merged(config, own), QUIET), changes))


@dataclass
class StopWhenAccurate:
    """As a signal would: what is shown needs no more steps."""

    trainer: Trainer

    def step(self, line: dict[str, Any]) -> None:
        pass

    def evaluation(self, line: dict[str, Any]) -> None:
        if line["sampled_reward"] >= ENOUGH:
            self.trainer.ask_to_stop(signal.SIGTERM)

    def close(self) -> None:
        pass
