"""Runs TRL's own `GRPOTrainer._compute_loss` on given tensors; writes its loss and its gradient in the logits.

Dimensions: B completions, T tokens of the longest one, V vocabulary.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

# What GRPOConfig has where nothing is given.
DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "max_completion_length": 256,
    "use_vllm": False,
}
ARGUMENTS: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
}


class OnTensors(GRPOTrainer):
    """The trainer without a model: its log-probs and entropies are those of given logits."""

    def __init__(self, settings: dict[str, Any], logits: torch.Tensor):
        self.logits = logits  # [B, T, V]
        for name, value in (DEFAULTS | settings).items():
            if name not in ARGUMENTS:
                setattr(self, name, value)
        self.args = SimpleNamespace(**ARGUMENTS | {name: settings[name] for name in ARGUMENTS if name in settings})
        self.model = torch.nn.Linear(1, 1)
        self.aux_loss_enabled = self.use_adaptive_entropy = False
        self._entropy_bonus_enabled = self.entropy_coef != 0.0
        self.vllm_importance_sampling_correction = self.use_vllm
        self.current_gradient_accumulation_steps = 1
        self._metrics = {"train": defaultdict(list)}
        self.accelerator = SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        )

    def _get_per_token_logps_and_entropies(self, model: Any, input_ids: torch.Tensor, *rest: Any, **options: Any):
        log_p = torch.log_softmax(self.logits, -1)
        labels = input_ids[:, -self.logits.shape[1] :]
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, labels[..., None])[..., 0], entropy, None


def main(given: str, made: str) -> None:
    results = []
    for settings, inputs in torch.load(given, weights_only=True):
        logits = inputs.pop("logits").requires_grad_()
        trainer = OnTensors(settings, logits)
        loss = trainer._compute_loss(trainer.model, inputs)
        (gradient,) = torch.autograd.grad(loss, logits)
        results.append((loss.detach(), gradient))
    torch.save(results, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
