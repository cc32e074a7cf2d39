"""Runs the training loop on the ranks of a layout, with an observer that writes the data of each step:

schedule.json             the learning rates of some steps
1/weights.safetensors     the weights before the step
1/states                  the optimizer states before the step, in the format of checkpoints
1/gradients.safetensors   the step's gradients before clipping
1/changed.safetensors     gradients that have changed by the time the optimizer uses them
1/step.json               loss, metrics, the documents' ids and advantages, scores
1/updates.json            for each update of the weights: learning rates, and the factor of the gradients
2/weights.safetensors     … and so on; after the last step, only weights and states
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

from truestep.config.schema import Config
from truestep.metrics.observers import Computed, Observer
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.run.assemble.policy import join_ranks
from truestep.run.checkpoint.saves import SaveRule
from truestep.run.train import make_trainer
from truestep.run.trainer import Trainer
from truestep.step.before.annotators import Annotator
from truestep.step.before.scoring import by_record
from truestep.step.update.optimizer import optimizer_parts
from truestep.types import StepPlan
from truestep.weights.tensor_parts import FOLDER, describe_parts, part_name, write_index

DONE = "seconds"  # the file that shows that a layout has run; it contains the seconds that it took


@dataclasses.dataclass(frozen=True)
class Task:
    options: dict[str, Any]
    output: Path
    positions: Sequence[int]  # steps of the user's schedule to compute
    schedule: Sequence[int]  # steps whose learning rates are written
    reverse: bool = False


def run_layouts(tasks: Sequence[Task], plant: Callable[[], None] | None = None) -> None:
    """Run layouts one after another. `plant` introduces a fault first, to test that verify finds it."""
    if plant is not None:
        plant()
    for task in tasks:
        started = time.perf_counter()
        ranks = _run(task)
        ranks.gather(None)  # a barrier
        if ranks.first:
            (task.output / DONE).write_text(str(time.perf_counter() - started), encoding="utf-8")


def _run(task: Task) -> Ranks:
    config = Config.model_validate(task.options)
    ranks = join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(config, Console(file=io.StringIO()), ranks=ranks, watch=watch)
        trainer.learner.runner = dataclasses.replace(trainer.runner, keep_scores=True)
        trainer.steps = None  # the run ends when its documents end, whatever schedule.steps is
        witness = _Witness(trainer, task)
        trainer.save_rule = SaveRule(never=True)  # the run is never resumed
        trainer.annotators.all.insert(0, witness)
        trainer.observers.add(witness)
        trainer.optimizer.register_step_pre_hook(lambda _, arguments, named: witness.update(named.get("scale", 1.0)))
        trainer.run()
        witness.write_weights(witness.number + 1)
    return ranks


@dataclasses.dataclass
class _Witness(Observer, Annotator):
    """Writes the data of each step, and moves the run to the steps of `Task.positions` in the schedule."""

    trainer: Trainer
    task: Task
    number: int = 0  # number of the current step, from 1
    _gradients: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    _updates: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # updates in this step

    def annotate(self, plan: StepPlan) -> StepPlan:
        """Move to the next step of `Task.positions`."""
        if self.number == 0 and self.trainer.ranks.first:
            rates = {step: self.trainer.learning_rate.at(step) for step in self.task.schedule}
            (self.task.output / "schedule.json").write_text(json.dumps(rates), encoding="utf-8")
        self.number += 1
        self.trainer.state.step = self.task.positions[self.number - 1] - 1
        self._updates = []
        self.write_weights(self.number)
        return _reversed(plan) if self.task.reverse else plan

    def gradient(self, plan: StepPlan, computed: Computed, norm: float) -> None:
        self._gradients = self._collect_gradients()
        if not self.trainer.ranks.first:
            return
        save_file(self._gradients, self._folder / "gradients.safetensors")
        line = {
            "metrics": computed.line() | {"grad_norm": norm},
            "documents": [sequence.id for sequence in plan.sequences],
            "documents_seen": plan.documents_seen,
            "advantages": {
                sequence.id: sequence.advantages[sequence.loss_mask].tolist()
                for sequence in plan.sequences
                if sequence.advantages is not None
            },
            "scores": [
                {"id": score.id, "logprobs": score.logprobs.tolist(), "entropy": score.entropy.tolist()}
                for _, score in by_record(plan.documents, computed.scores)
            ],
        }
        (self._folder / "step.json").write_text(json.dumps(line), encoding="utf-8")

    def update(self, scale: float) -> None:
        """Write the learning rates, the factor and the gradients that the optimizer gets."""
        weights, gradients = self.trainer.policy.weights, self._collect_gradients()
        names = {id(master): name for name, master in weights.master.items()}
        groups = self.trainer.optimizer.param_groups
        rates = {names[id(weight)]: float(group["lr"]) for group in groups for weight in group["params"]}
        told = self.trainer.ranks.gather((rates, scale) if rates else None)
        if not self.trainer.ranks.first:
            return
        changed = {name: value for name, value in gradients.items() if not value.equal(self._gradients[name])}
        save_file(changed, self._folder / "changed.safetensors")
        known = [each for each in told if each is not None]
        self._updates.append({"rates": {k: v for own, _ in known for k, v in own.items()}, "scale": known[0][1]})
        (self._folder / "updates.json").write_text(json.dumps(self._updates), encoding="utf-8")

    def write_weights(self, number: int) -> None:
        ranks, folder = self.trainer.ranks, self.task.output / str(number)
        weights = self.trainer.policy.weights.collect()
        if ranks.first:
            (folder / "states" / FOLDER).mkdir(parents=True, exist_ok=True)
            copies = {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in weights.items()}
            save_file(copies, folder / "weights.safetensors")
            routing = self.trainer.policy.routing
            if routing is not None and routing.biases:
                save_file(
                    {name: bias.cpu().clone() for name, bias in routing.biases.items()}, folder / "biases.safetensors"
                )
        ranks.gather(None)  # a barrier: the folder exists
        file = folder / "states" / FOLDER / part_name(ranks.rank)
        parts = list(optimizer_parts(self.trainer.optimizer, self.trainer.policy.weights))
        save_file({part.key: part.values.detach().to("cpu", copy=True).contiguous() for part in parts}, file)
        described = ranks.gather(describe_parts(file, parts))
        if ranks.first:
            write_index(folder / "states" / FOLDER, described)

    @property
    def _folder(self) -> Path:
        return self.task.output / str(self.number)

    def _collect_gradients(self) -> dict[str, torch.Tensor]:
        gradients = self.trainer.policy.weights.collect_gradients()
        return {name: value.float().cpu().contiguous() for name, value in gradients.items()}


def _reversed(plan: StepPlan) -> StepPlan:
    """Reverse the order of micro-batches, and of documents in each."""
    micro_batches = tuple(tuple(reversed(members)) for members in reversed(plan.micro_batches))
    return dataclasses.replace(plan, micro_batches=micro_batches)
