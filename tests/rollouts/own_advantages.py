"""Advantages that tests name by import path, good and bad."""

import numpy as np
import torch


def against_the_best(group):
    best = max(rollout.reward for rollout in group)
    return [rollout.reward - best for rollout in group]


def as_array(group):
    return np.array([rollout.reward for rollout in group], dtype=np.float32)


def as_tensor(group):
    return torch.tensor([rollout.reward for rollout in group])


def by_parts(group):
    return [2 * rollout.rewards["format"] - rollout.num_labels for rollout in group]


def too_few(group):
    return [0.0] * (len(group) - 1)


def not_finite(group):
    return [0.0, float("nan"), *[0.0] * (len(group) - 2)]


def text(group):
    return ["1"] * len(group)


def raises(group):
    raise KeyError("no such\x1b[31m thing")


def exits(group):
    raise SystemExit(3)


def nothing(group):
    return None


def by_difficulty(group):
    return [float(rollout.reward * rollout.document_fields["difficulty"]) for rollout in group]
