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


def by_turns(group):
    """The reward of each turn, less the mean of the group's rewards, at the turn's own tokens."""
    mean = sum(rollout.reward for rollout in group) / len(group)
    advantages = []
    for rollout in group:
        values = [rollout.reward - mean] * rollout.num_tokens
        for turn in rollout.turns:
            if turn.reward is not None:
                values[turn.start : turn.end] = [turn.reward - mean] * (turn.end - turn.start)
        advantages.append(values)
    return advantages


def by_label(group):
    return [np.arange(rollout.num_labels) - 1.5 for rollout in group]


def of_some_length(group):
    return [[0.0] * 99 for _ in group]


def with_a_nan(group):
    return [[float("nan")] * rollout.num_tokens for rollout in group]
