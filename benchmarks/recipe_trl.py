"""Trains the largest of three numbers by TRL's GRPOTrainer: recipe_beside_trl.py starts it, with TRL's packages.

    python benchmarks/recipe_trl.py ASKED.json

ASKED has the model, the prompts, the directory for the trained model and the settings. This process imports nothing of
truestep. It writes `steps.json` beside the model: the seconds and the mean reward of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # before the imports that read it

import torch
from datasets import Dataset
from recipe_task import right
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times each step, its sampling with it, and keeps the reward that the trainer logs for it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.rewards: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(now() - self.start)

    def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float] | None = None, **____: Any) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [right(completion, expected) for completion, expected in zip(completions, answer, strict=True)]


def main(file: Path) -> None:
    asked = json.loads(file.read_text())
    rows = [json.loads(line) for line in Path(asked["prompts"]).read_text().splitlines()]
    tokenizer, clock = AutoTokenizer.from_pretrained(asked["model"]), Clock()
    output = Path(asked["output"])
    settings = GRPOConfig(
        output_dir=str(output.with_suffix(".trainer")),
        model_init_kwargs={"dtype": "float32"},  # its own default: bfloat16 is by autocast
        bf16=asked["dtype"] == "bfloat16",
        use_cpu=asked["device"] == "cpu",
        seed=asked["seed"],
        num_generations=asked["group_size"],
        per_device_train_batch_size=asked["documents"],
        gradient_checkpointing=False,
        max_completion_length=asked["max_new_tokens"],
        max_steps=asked["steps"],
        learning_rate=asked["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        temperature=1.0,
        loss_type="dapo",  # the mean over all labels of the step, as ours
        epsilon=0.2,
        beta=0.0,
        scale_rewards="group",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=asked["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(output))
    tokenizer.save_pretrained(output)
    (output / "steps.json").write_text(json.dumps({"seconds": clock.seconds, "rewards": clock.rewards}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
