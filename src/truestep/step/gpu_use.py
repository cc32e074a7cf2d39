"""A step's GPU memory, and its speed as a share of the GPU's peak (MFU)."""

from collections.abc import Mapping

import numpy as np
import torch

from truestep.metrics.spent import PREFIX
from truestep.model.policy import ModelFacts, Policy
from truestep.rollouts.prefixes import forest_of
from truestep.types import StepPlan

GIB = 2**30
# Peak FLOP/s of dense bfloat16 matrix products, as the makers state them, by a part of the device's name. The first
# match counts.
PEAKS = (
    ("B300", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H20", 148e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("A10", 125e12),
)


def peak_of(device_name: str) -> float | None:
    """Look up the peak FLOP/s of a device; None if unknown."""
    return next((peak for part, peak in PEAKS if part in device_name), None)


def training_operations(facts: ModelFacts, plan: StepPlan) -> float:
    """Count the FLOPs of a step's matrix products, forward and backward: 6 per weight and token, 4 if the weight is not
    trained. The head computes only labels; attention is causal. Recomputed work is not counted, and a shared prefix
    counts once."""
    tokens, squares = 0, 0
    for members in plan.micro_batches:
        forest = forest_of(plan, members)
        lengths = [(0, plan.sequences[index].num_tokens) for index in members]
        if forest is not None:
            lengths = [(segment.start, segment.stop) for segment in forest.segments]
        tokens += sum(stop - start for start, stop in lengths)
        squares += sum(stop**2 - start**2 for start, stop in lengths)
    layers = facts.weights * tokens + facts.attention * squares
    untrained = facts.untrained * tokens
    untrained += 0 if facts.head_trained else facts.head_weights * plan.totals.num_labels
    return 6.0 * (layers + facts.head_weights * plan.totals.num_labels) - 2.0 * untrained


def gpu_metrics(policy: Policy, plan: StepPlan, times: Mapping[str, float]) -> dict[str, float]:
    """Measure the first rank's peak memory so far, and the MFU over all GPUs during the step's computation."""
    if policy.device.type != "cuda":
        return {}
    metrics = {"gpu_memory": torch.cuda.max_memory_allocated(policy.device) / GIB}
    seconds = float(np.sum([times.get(PREFIX + name, 0.0) for name in ("forward", "head", "backward", "reduce")]))
    peak = peak_of(torch.cuda.get_device_name(policy.device))
    if peak is not None and seconds > 0:
        metrics["mfu"] = training_operations(policy.facts, plan) / (peak * policy.weights.ranks.size * seconds)
    return metrics
