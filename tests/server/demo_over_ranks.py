"""The demo's task through a real server, with the trainer on several ranks: the part that the ranks run."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from rich.console import Console

from server.demo_runs import StopWhenAccurate
from truestep.config.schema import Config
from truestep.generate.servers.weight_files import WeightsDirectory
from truestep.ranks.watch import Watch
from truestep.rollouts.shared import SharedSource
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer

TAKEN = "taken.pickle"  # what each step trained on


def train_until_accurate(config: dict[str, Any], folder: str) -> None:
    """Train until the held-out prompts are answered well enough. All published weights stay, and what was taken."""
    WeightsDirectory._remove_old = lambda self, newest: None  # type: ignore[method-assign]
    WeightsDirectory.clear = lambda self: None  # type: ignore[method-assign]
    given = Config.model_validate(config)
    ranks = join_ranks(given)
    watch = Watch(ranks, given.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(given, Console(file=io.StringIO()), ranks=ranks, watch=watch)
        steps: list[tuple[int, list[Any]]] = []
        source: Any = trainer.source
        assert isinstance(source, SharedSource)
        take = source.take

        def recorded(count: int, documents_seen: int) -> Any:
            taken = take(count, documents_seen)
            steps.append((documents_seen, list(taken.documents)))
            return taken

        source.take = recorded
        if ranks.first:
            trainer.sinks.append(StopWhenAccurate(trainer))
        trainer.run()
    if ranks.first:
        Path(folder, TAKEN).write_bytes(pickle.dumps(steps))
