"""Documents made for the tests of packing, plans, queues and checkpoints: every field present or absent, any mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from truestep.rollouts.packing import pack
from truestep.types import PackedBatch, Rollout

ARRAYS = (
    "input_ids",
    "loss_mask",
    "logprobs",
    "advantages",
    "model_version",
    "reference_logprobs",
    "recomputed_logprobs",
    "chosen",
)


def make_document(name: str, length: int, seed: int = 0, *, vocabulary: int = 61, bare: bool = False) -> Rollout:
    """With a random mask of several spans; every optional field is there unless `bare`."""
    generator = np.random.default_rng([seed, length])
    mask = generator.random(length) < 0.5
    mask[0] = False

    def on_labels(values: np.ndarray) -> np.ndarray:
        return np.where(mask, values, 0).astype(values.dtype)

    document = Rollout(id=name, input_ids=generator.integers(0, vocabulary, length), loss_mask=mask)
    if bare:
        return document
    return dataclasses.replace(
        document,
        logprobs=on_labels(-generator.exponential(1.0, length).astype(np.float32)),
        advantages=on_labels(generator.normal(size=length).astype(np.float32)),
        reward=float(generator.normal()),
        group_id=f"group-{seed % 3}",
        temperature=float(generator.uniform(0.5, 1.5)),
        model_version=on_labels(generator.integers(0, 100, length)),
        reference_logprobs=on_labels(-generator.exponential(1.0, length).astype(np.float32)),
        chosen=(mask & (generator.random(length) < 0.5)).astype(np.uint8),
        truncated=bool(seed % 2),
        rewards={"format": float(generator.normal())} | ({"unit": 0.1} if seed % 3 else {}),
        metadata={"seed": seed},
    )


def make_documents(lengths: Sequence[int], seed: int = 0) -> tuple[Rollout, ...]:
    return tuple(make_document(f"d{index}", length, seed + index) for index, length in enumerate(lengths))


def pack_all(documents: Sequence[Rollout], pad_to_multiple: int = 1) -> PackedBatch:
    """All of them as one micro-batch."""
    return pack(documents, pad_to_multiple)


def same_document(left: Rollout, right: Rollout) -> bool:
    """Bit for bit."""
    for item in dataclasses.fields(Rollout):
        first, second = getattr(left, item.name), getattr(right, item.name)
        if item.name in ARRAYS and first is not None and second is not None:
            if first.dtype != second.dtype or first.tobytes() != second.tobytes():
                return False
        elif first != second:
            return False
    return True


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Stricter than torch.equal: -0.0 is not 0.0, and the dtype counts."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    first, second = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (left, right))
    return torch.equal(first, second)
