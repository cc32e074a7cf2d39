"""Packed documents of a family against transformers' own code on each document alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from documents import make_documents, pack_all
from truestep.model.policy import Policy
from truestep.model.towers import whole_of
from truestep.tools.verify.reference import Float64
from truestep.types import Rollout

LENGTHS = (7, 1, 19, 2, 33, 5)
TOLERANCE = 1e-5
DOCUMENTS = make_documents(LENGTHS, seed=11)


@dataclass(frozen=True)
class Numbers:
    logprobs: torch.Tensor  # of each next token, document by document
    gradients: dict[str, torch.Tensor]  # of a weighted sum of the log-probs


def _weights_of(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(5))


def _ids(document: Rollout) -> torch.Tensor:
    return torch.from_numpy(document.input_ids)


def of_transformers(directory: Path, model: Any = None, dtype: torch.dtype = torch.float32) -> Numbers:
    """Compute each document alone by transformers' own code, with explicit scores (`eager`)."""
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    model.eval()
    found = []
    for document in DOCUMENTS:
        ids = _ids(document)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        found.append(_next(logits, ids))
    logprobs = torch.cat(found)
    (logprobs * _weights_of(len(logprobs))).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return Numbers(logprobs.detach(), gradients)


def _next(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def of_policy(policy: Policy, documents: Sequence[Rollout] = DOCUMENTS, gradients: bool = True) -> Numbers:
    """Compute documents packed as one micro-batch."""
    policy.weights.zero_gradients()
    with policy.weights.gathered():
        hidden = policy.hidden(pack_all(documents, 4).tokens)
        logits = policy.head.scale * (hidden @ policy.head_weight.T)
        if policy.head.softcap is not None:
            logits = policy.head.softcap * torch.tanh(logits / policy.head.softcap)
        first, found = 0, []
        for document in documents:
            found.append(_next(logits[first : first + len(document.input_ids)], _ids(document)))
            first += len(document.input_ids)
        logprobs = torch.cat(found)
        if gradients:
            (logprobs * _weights_of(len(logprobs))).sum().backward()
    whole = whole_of(policy.model)
    gradients_of = {
        name if whole is None else whole.name(name): value.clone() for name, value in policy.weights.gradients.items()
    }
    return Numbers(logprobs.detach(), gradients_of)


def worst(ours: Numbers, theirs: Numbers) -> tuple[float, str]:
    """Return the largest relative difference, and what differs."""
    found = [(float((ours.logprobs - theirs.logprobs).abs().max()), "log-probs")]
    scale = max(float(value.norm()) for value in theirs.gradients.values())
    for name, value in ours.gradients.items():
        right = theirs.gradients.get(name)
        right = torch.zeros_like(value) if right is None else right
        found.append((float((value - right).norm() / max(float(right.norm()), 1e-3 * scale, 1e-9)), name))
    missing = theirs.gradients.keys() - ours.gradients.keys()
    found += [(float("inf"), name) for name in missing if theirs.gradients[name].any()]
    return max(found, key=lambda each: (each[0] != each[0], each[0]))


def distance(ours: Numbers, theirs: Numbers, directory: Path) -> float:
    """Return how far ours are from theirs. Where rounding alone takes transformers' float32 as far from its float64,
    ours may be three times as far from that."""
    found, _ = worst(ours, theirs)
    if found <= TOLERANCE:
        return found
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with Float64():  # parts of models' code would compute in float32 whatever they are given
        exact = of_transformers(
            directory, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **how), torch.float64
        )
    rounded, _ = worst(theirs, exact)
    own, _ = worst(ours, exact)
    return TOLERANCE * own / max(3 * rounded, TOLERANCE) if own <= 1e-2 else found
