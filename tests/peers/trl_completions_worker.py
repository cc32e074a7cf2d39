"""Trains a tiny model with TRL's own GRPOTrainer on the CPU, so that it writes its tables of completions."""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def short(completions: list[str], **_: Any) -> list[float]:
    return [round(1 / (1 + len(text)), 4) for text in completions]


def even(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("2") % 2) for text in completions]


def train(given: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = Dataset.from_dict({"prompt": given["prompts"]})
    settings = {
        "output_dir": given["output"], "log_completions": True, "logging_steps": 1, "report_to": [], "use_cpu": True,
        "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 24, "max_steps": 3,
        "learning_rate": 1e-3, "save_strategy": "no", "bf16": False, "num_completions_to_print": 0, "seed": 1,
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
        reward_funcs=[short, even],
        args=GRPOConfig(**settings | given.get("settings", {})),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    train(torch.load(sys.argv[1], weights_only=True))
    torch.save({"done": True}, sys.argv[2])
