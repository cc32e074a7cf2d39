"""A mixture of experts in plain float64 loops: one token at a time, one expert at a time.

It shares no code with what it judges. `block` is a family's module, of which only the weights are read. Gradients are
autograd's, of these loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]  # of a block, by name, in float64


def outputs(
    family: str, config: Any, weights: Weights, x: Tensor, given: list[list[int] | None] | None = None
) -> tuple[Tensor, list[list[int]]]:
    """Compute a block's output [T, H] for tokens [T, H], and the experts of each token. `given`: the experts of each
    token, None where the router chooses."""
    rows, chosen = [], []
    for place, token in enumerate(x):
        numbers, scores = ROUTERS[family](config, weights, token)
        if given is not None and (named := given[place]) is not None:
            numbers, scores = named, weighed(family, config, weights, token, named)
        total = torch.zeros_like(token)
        for number, score in zip(numbers, scores, strict=True):
            total = total + score * expert(family, weights, number, token)
        if "shared_expert.gate_proj.weight" in weights:  # Qwen3.5's has a gate
            gate = torch.sigmoid(weights["shared_expert_gate.weight"][0] @ token)
            total = total + gate * mlp(weights, "shared_expert", token)
        if "shared_experts.gate_proj.weight" in weights:
            total = total + mlp(weights, "shared_experts", token)
        rows.append(total)
        chosen.append(numbers)
    return torch.stack(rows), chosen


def weighed(family: str, config: Any, weights: Weights, token: Tensor, numbers: list[int]) -> list[Tensor]:
    """Weigh given experts by all logits: shares of a softmax, or sigmoids, maybe divided by their sum."""
    logits = weights["router.weight" if family == "gpt_oss" else "gate.weight"] @ token
    if family == "gpt_oss":
        logits = logits + weights["router.bias"]
    if family in ("glm4_moe", "deepseek_v3", "lfm2_moe"):
        scores = [1 / (1 + torch.exp(-logits[number])) for number in numbers]
        least = 1e-6 if family == "lfm2_moe" else 1e-20
        total = sum(scores) + least if config.norm_topk_prob else 1.0
        return [score / total * config.routed_scaling_factor for score in scores]
    shares = [torch.exp(logits[number] - logits.max()) for number in numbers]
    whole = torch.exp(logits - logits.max()).sum() if family == "qwen3_moe" else sum(shares)
    return [share / whole for share in shares]


def mlp(weights: Weights, name: str, token: Tensor) -> Tensor:
    gate, up, down = (weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return down @ (silu(gate @ token) * (up @ token))


def expert(family: str, weights: Weights, number: int, token: Tensor) -> Tensor:
    both, down = weights["experts.gate_up_proj"][number], weights["experts.down_proj"][number]
    if family == "gpt_oss":  # matrices by columns, gate and up by turns, biases, a clamp
        inner = token @ both + weights["experts.gate_up_proj_bias"][number]
        gate = inner[0::2].clamp(max=7.0)
        up = inner[1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ down + weights["experts.down_proj_bias"][number]
    inner = both @ token
    half = len(inner) // 2
    return down @ (silu(inner[:half]) * inner[half:])


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def highest(scores: Tensor, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda number: -float(scores[number]))[:count]


def softmax_router(normalised: bool) -> Callable[[Any, Weights, Tensor], tuple[list[int], list[Tensor]]]:
    def route(config: Any, weights: Weights, token: Tensor) -> tuple[list[int], list[Tensor]]:
        logits = weights["gate.weight"] @ token
        shares = torch.exp(logits - logits.max())
        shares = shares / shares.sum()
        numbers = highest(shares, config.num_experts_per_tok)
        scores = [shares[number] for number in numbers]
        return numbers, [score / sum(scores) for score in scores] if normalised else scores

    return route


def top_router(config: Any, weights: Weights, token: Tensor) -> tuple[list[int], list[Tensor]]:
    """Choose by logits, and weigh by a softmax over the chosen ones alone (gpt-oss)."""
    logits = weights["router.weight"] @ token + weights["router.bias"]
    numbers = highest(logits, config.num_experts_per_tok)
    scores = [torch.exp(logits[number]) for number in numbers]
    return numbers, [score / sum(scores) for score in scores]


def grouped_router(config: Any, weights: Weights, token: Tensor) -> tuple[list[int], list[Tensor]]:
    """Choose groups by the sum of their two best, then experts in them, by scores with a bias (DeepSeek, GLM)."""
    scores = torch.sigmoid(weights["gate.weight"] @ token)
    biased = (scores + weights["gate.e_score_correction_bias"]).tolist()
    size = len(biased) // config.n_group
    groups = [sum(sorted(biased[size * g : size * (g + 1)])[-2:]) for g in range(config.n_group)]
    kept = highest(torch.tensor(groups), config.topk_group)
    numbers = sorted((n for n in range(len(biased)) if n // size in kept), key=lambda number: -biased[number])
    numbers = numbers[: config.num_experts_per_tok]
    chosen = [scores[number] for number in numbers]
    total = sum(chosen) + 1e-20 if config.norm_topk_prob else 1.0
    return numbers, [score / total * config.routed_scaling_factor for score in chosen]


def biased_router(config: Any, weights: Weights, token: Tensor) -> tuple[list[int], list[Tensor]]:
    """Choose by scores with a bias (LFM2)."""
    scores = torch.sigmoid(weights["gate.weight"] @ token)
    numbers = highest(scores + weights["expert_bias"], config.num_experts_per_tok)
    chosen = [scores[number] for number in numbers]
    total = sum(chosen) + 1e-6 if config.norm_topk_prob else 1.0
    return numbers, [score / total * config.routed_scaling_factor for score in chosen]


ROUTERS: dict[str, Callable[[Any, Weights, Tensor], tuple[list[int], list[Tensor]]]] = {
    "qwen3_moe": softmax_router(normalised=False),
    "qwen3_5_moe_text": softmax_router(normalised=True),
    "glm4_moe": grouped_router,
    "deepseek_v3": grouped_router,
    "gpt_oss": top_router,
    "mixtral": softmax_router(normalised=True),
    "lfm2_moe": biased_router,
}
