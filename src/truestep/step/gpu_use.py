"""What a step makes of a GPU: its memory, and the share of its products' peak speed that is reached."""

from collections.abc import Mapping

import numpy as np
import torch

from truestep.metrics.spent import PREFIX
from truestep.model.policy import ModelFacts, Policy
from truestep.rollouts.prefixes import share
from truestep.types import StepPlan

GIB = 2**30
# Dense bfloat16 products a second, as the makers state them, by a part of the device's name; the first that fits.
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
    """Look up the operations a second of a device; None where they are not known."""
    return next((peak for part, peak in PEAKS if part in device_name), None)


def training_operations(facts: ModelFacts, plan: StepPlan) -> float:
    """Count the operations of a step's products, forward and backward: 6 for each weight and token, 4 where a weight is
    not trained. The head has only labels; attention is causal. Nothing that is computed twice counts twice, and a
    shared prefix counts once."""
    tokens, squares = 0, 0
    for members in plan.micro_batches:
        sequences = [plan.sequences[index] for index in members]
        forest = share(sequences, plan.sharing)
        lengths = [(0, sequence.num_tokens) for sequence in sequences]
        if forest is not None:
            lengths = [(segment.start, segment.stop) for segment in forest.segments]
        tokens += sum(stop - start for start, stop in lengths)
        squares += sum(stop**2 - start**2 for start, stop in lengths)
    layers = facts.weights * tokens + facts.attention * squares
    untrained = facts.untrained * tokens
    untrained += 0 if facts.head_trained else facts.head_weights * plan.totals.num_labels
    return 6.0 * (layers + facts.head_weights * plan.totals.num_labels) - 2.0 * untrained


def gpu_metrics(policy: Policy, plan: StepPlan, times: Mapping[str, float]) -> dict[str, float]:
    """Measure the first rank's memory at its peak so far, and the share of all GPUs' speed while the step computes."""
    if policy.device.type != "cuda":
        return {}
    metrics = {"gpu_memory": torch.cuda.max_memory_allocated(policy.device) / GIB}
    seconds = float(np.sum([times.get(PREFIX + name, 0.0) for name in ("forward", "head", "backward", "reduce")]))
    peak = peak_of(torch.cuda.get_device_name(policy.device))
    if peak is not None and seconds > 0:
        metrics["mfu"] = training_operations(policy.facts, plan) / (peak * policy.weights.ranks.size * seconds)
    return metrics
