"""The work of one layout's ranks: the real training loop, with a witness that writes what each step is made of.

1/weights.safetensors     the weights before the step
1/gradients.safetensors   the step's gradients before clipping
1/step.json               loss, metrics, the documents' ids, learning rate, scores
2/weights.safetensors     … and so on; after the last step, the weights alone
"""

import dataclasses
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from truestep.assemble.policy import join_ranks
from truestep.config.schema import Config
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.step.runner import Accumulated
from truestep.train import make_trainer
from truestep.trainer import Hooks, Trainer
from truestep.types import StepPlan

DONE = "seconds"  # this file shows that a layout has been run, and holds how long that took


@dataclasses.dataclass(frozen=True)
class Task:
    options: dict[str, Any]
    output: Path
    reverse: bool = False


def run_layouts(tasks: Sequence[Task], plant: Callable[[], None] | None = None) -> None:
    """Run layouts one after another. `plant` makes a fault first, so that a check that cannot fail is found out."""
    if plant is not None:
        plant()
    for task in tasks:
        started = time.perf_counter()
        ranks = _run(task)
        ranks.gather(None)  # waits until every rank has come to its end
        if ranks.first:
            (task.output / DONE).write_text(str(time.perf_counter() - started), encoding="utf-8")


def _run(task: Task) -> Ranks:
    config = Config.model_validate(task.options)
    ranks = join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks, watch=watch)
        trainer.runner = dataclasses.replace(trainer.runner, keep_scores=True)
        witness = _Witness(trainer, task.output)
        trainer.hooks = Hooks(
            saves=False,  # nobody resumes this run
            change_plan=_reversed if task.reverse else None,
            on_gradient=witness.write,
        )
        trainer.run()
        witness.write_weights(trainer.step + 1)
    return ranks


@dataclasses.dataclass(frozen=True)
class _Witness:
    trainer: Trainer
    output: Path

    def write(self, plan: StepPlan, accumulated: Accumulated, norm: float) -> None:
        step = self.trainer.step + 1
        self.write_weights(step)
        gradients = self.trainer.policy.weights.collect_gradients()
        if not self.trainer.ranks.first:
            return
        folder = self.output / str(step)
        copies = {name: value.float().cpu().contiguous() for name, value in gradients.items()}
        save_file(copies, folder / "gradients.safetensors")
        line = {
            "metrics": accumulated.line() | {"grad_norm": norm},
            "documents": [document.id for document in plan.documents],
            "documents_seen": plan.documents_seen,
            "learning_rate": self.trainer.learning_rate.at(step),
            "scores": [
                {"id": score.id, "logprobs": score.logprobs.tolist(), "entropy": score.entropy.tolist()}
                for score in accumulated.scores
            ],
        }
        (folder / "step.json").write_text(json.dumps(line), encoding="utf-8")

    def write_weights(self, step: int) -> None:
        weights = self.trainer.policy.weights.collect()
        if self.trainer.ranks.first:
            folder = self.output / str(step)
            folder.mkdir(parents=True, exist_ok=True)
            copies = {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in weights.items()}
            save_file(copies, folder / "weights.safetensors")


def _reversed(plan: StepPlan) -> StepPlan:
    """Reverse the order of the micro-batches, and that of the documents in each."""
    micro_batches = tuple(tuple(reversed(members)) for members in reversed(plan.micro_batches))
    return dataclasses.replace(plan, micro_batches=micro_batches)
