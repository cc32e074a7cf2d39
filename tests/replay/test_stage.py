"""Faults of kernels that are planted in one of two runs: `compare` names the step, the stage and the layer."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selection import long_except
from small_runs import file_config, merged, quiet_trainer, write_rollouts
from truestep.run.trainer import Trainer
from truestep.step.compute.runner import StepRunner
from truestep.tools.replay.compare import compare
from truestep.types import StepPlan

Model = Callable[[str], Path]
WRONG, STEP = 1.001, 4  # what the faulty kernel multiplies by, and the first step that it is used in
OPTIONS: dict[str, Any] = {
    "logging": {"rollouts": {"documents": "all"}},
    "optimizer": {"learning_rate": 1e-6},
    "deterministic": True,
}


class Off(torch.autograd.Function):
    """Multiplies on the way forward, or on the way back."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, ahead: float, back: float) -> torch.Tensor:
        context.back = back
        return values * ahead

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * context.back, None, None


Fault = Callable[[Trainer, pytest.MonkeyPatch], None]


def due(trainer: Trainer) -> bool:
    return trainer.step + 1 >= STEP


def module(trainer: Trainer, end: str) -> nn.Module:
    (found,) = [one for name, one in trainer.policy.model.named_modules() if name.endswith(end)]
    return found


def of_a_module(end: str, ahead: float = 1.0, back: float = 1.0) -> Fault:
    """Its output is wrong, or the gradient that goes back into it."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if not due(trainer):
                return None
            if isinstance(output, tuple):
                return (Off.apply(output[0], ahead, back), *output[1:])
            return Off.apply(output, ahead, back)

        module(trainer, end).register_forward_hook(hook)

    return plant


def of_a_modules_entry(end: str) -> Fault:
    """The gradient that goes from it to what is before it is wrong."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        def hook(_: nn.Module, given: tuple[Any, ...]) -> Any:
            return (Off.apply(given[0], 1.0, WRONG), *given[1:]) if due(trainer) else None

        module(trainer, end).register_forward_pre_hook(hook)

    return plant


def of_a_weights_gradient(end: str) -> Fault:
    """The product for one weight, while what goes on to the layers before is right."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        accumulate = trainer.runner.__class__.accumulate

        def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
            result = accumulate(self, *arguments, **options)
            if due(trainer):
                for name, gradient in trainer.policy.weights.gradients.items():
                    if name.endswith(end):
                        gradient.mul_(WRONG)
            return result

        patch.setattr(trainer.runner.__class__, "accumulate", wrong)

    return plant


def of_a_function(path: str, change: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Fault:
    """What computes it in the run is replaced: `change` gets it with its arguments."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        place, _, name = path.rpartition(".")
        right = getattr(importlib.import_module(place), name)

        def wrong(*arguments: Any, **options: Any) -> Any:
            return change(right, arguments, options) if due(trainer) else right(*arguments, **options)

        patch.setattr(path, wrong)

    return plant


def all_logprobs(right: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    found = right(*arguments, **options)
    return replace(found, logprobs=found.logprobs * WRONG)


def last_row_of_a_chunk(right: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    found = right(*arguments, **options)
    found.logprobs[-1] *= WRONG
    return found


def scaled(right: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return right(*arguments, **options).mul_(WRONG)


def of_the_update(only: str | None = None) -> Fault:
    """AdamW moves weights by a thousandth too far: torch's fused kernel, with all weights or with one."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        masters = trainer.policy.weights.master
        odd = {one.data_ptr() for name, one in masters.items() if only in (None, name)}

        def change(right: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            weights, gradients, means, squares, _, numbers = arguments
            for place, weight in enumerate(weights):
                rate = options["lr"] * (WRONG if weight.data_ptr() in odd else 1.0)
                own = ([weight], [gradients[place]], [means[place]], [squares[place]], [], [numbers[place]])
                right(*own, **{**options, "lr": rate})

        of_a_function("torch._fused_adamw_", change)(trainer, patch)

    return plant


HEAD = "truestep.head.passes."
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "log-probs of the head": (of_a_function(f"{HEAD}row_statistics", all_logprobs), "forward", "forward pass"),
    "the last row of a chunk of the head": (
        of_a_function(f"{HEAD}row_statistics", last_row_of_a_chunk),
        "forward",
        "forward pass",
    ),
    "the head, backward": (
        of_a_function(f"{HEAD}logits_gradient_", scaled),
        "gradient",
        "the head, the loss or the last norm",
    ),
    "a norm, forward": (of_a_module("layers.1.input_layernorm", ahead=WRONG), "forward", "forward pass"),
    "the last norm, forward": (of_a_module("model.norm", ahead=WRONG), "forward", "forward pass"),
    "attention, forward": (of_a_module("layers.0.self_attn", ahead=WRONG), "forward", "forward pass"),
    "an MLP, forward": (of_a_module("layers.1.mlp", ahead=WRONG), "forward", "forward pass"),
    "attention, backward": (
        of_a_module("layers.0.self_attn", back=WRONG),
        "gradient",
        "backward pass of model.layers.0",
    ),
    "an MLP, backward": (of_a_module("layers.1.mlp", back=WRONG), "gradient", "backward pass of model.layers.1"),
    "a norm's entry, backward": (
        of_a_modules_entry("layers.1.input_layernorm"),
        "gradient",
        "the backward pass of model.layers.0, or the entry of model.layers.1: model.layers.0 and what is before it",
    ),
    "the first norm's entry, backward": (
        of_a_modules_entry("layers.0.input_layernorm"),
        "gradient",
        "the gradient of model.embed_tokens.weight alone, or the entry of model.layers.0: no layer's",
    ),
    "the last norm, backward": (
        of_a_module("model.norm", back=WRONG),
        "gradient",
        "the head, the loss or the last norm",
    ),
    "a weight's product": (
        of_a_weights_gradient("layers.1.mlp.up_proj.weight"),
        "gradient",
        "the gradient of model.layers.1.mlp.up_proj.weight alone",
    ),
    "the head's product": (of_a_weights_gradient("lm_head.weight"), "gradient", "the gradient of lm_head.weight alone"),
    "AdamW": (of_the_update(), "update", " of 21 weights, or what came after"),
    "AdamW, of one weight": (
        of_the_update("model.layers.1.self_attn.k_proj.weight"),
        "update",
        "the update of model.layers.1.self_attn.k_proj.weight, or",
    ),
}


def made(model: Path, folder: Path, name: str, patch: pytest.MonkeyPatch, *faults: Fault, **sections: Any) -> Path:
    if not (folder / "r.jsonl").exists():
        write_rollouts(folder / "r.jsonl", 25)
    trainer = quiet_trainer(file_config(model, folder / "r.jsonl", folder / name, **merged(OPTIONS, sections)))
    with patch.context() as own:
        for fault in faults:
            fault(trainer, own)
        trainer.run()
    return folder / name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_named_by_its_step_stage_and_layer(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, stage, said = FAULTS[fault]
    right = made(tiny_model("llama"), tmp_path, "right", monkeypatch)
    wrong = made(tiny_model("llama"), tmp_path, "wrong", monkeypatch, plant)
    found = compare(right, wrong)
    assert (found.step, found.cause, found.stage) == (STEP, "numerics", stage), found.text
    assert said in found.text, found.text


def in_any_order(seed: int) -> Fault:
    """Micro-batches are added in an order that chance decides, as atomic additions are: all steps round otherwise."""

    def plant(trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        accumulate, chance = StepRunner.accumulate, random.Random(seed)

        def shuffled(self: StepRunner, plan: StepPlan, *arguments: Any, **options: Any) -> Any:
            order = tuple(chance.sample(plan.micro_batches, len(plan.micro_batches)))
            return accumulate(self, replace(plan, micro_batches=order), *arguments, **options)

        patch.setattr(StepRunner, "accumulate", shuffled)

    return plant


NOISY = ["log-probs of the head", "the head, backward", "an MLP, forward", "a weight's product"]


@pytest.mark.parametrize("fault", [None, *long_except(NOISY, "log-probs of the head")])
def test_a_faulty_kernel_is_told_from_rounding(
    tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    """Runs that are not deterministic differ from the first step on; the step with the fault differs far more."""
    plant, stage, said = FAULTS[fault] if fault else (lambda trainer, patch: None, None, "without deterministic: true")
    options = {"deterministic": False, "data": {"tokens_per_microbatch": 20}}
    model = tiny_model("llama")
    right = made(model, tmp_path, "right", monkeypatch, in_any_order(1), **options)
    wrong = made(model, tmp_path, "wrong", monkeypatch, in_any_order(2), plant, **options)
    found = compare(right, wrong)
    assert found.cause == "numerics" and said in found.text, found.text
    assert (found.step == STEP) == (fault is not None), found.text
    assert ("differs by more than rounding" in found.text) == (fault is not None), found.text
    assert fault is None or found.stage == stage, found.text
