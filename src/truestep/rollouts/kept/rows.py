"""The row of a kept rollout: prompt, completion, reward, advantage, and the policy's log-probs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from truestep.rollouts.episodes import facts_of
from truestep.rollouts.kept.conversation import blocks_of
from truestep.rollouts.kept.reader import Reader, cut
from truestep.types import DocumentScore, Rejected, Rollout

NAME = 1000  # characters of an id


def choose(documents: Sequence[Rollout], most: int) -> list[int]:
    """Return the indices of the documents to keep: whole groups, spread evenly over the step, at most `most` documents.

    The result depends only on the step's documents.
    """
    groups: dict[str | int, list[int]] = {}
    for place, document in enumerate(documents):
        groups.setdefault(document.group_id if document.group_id is not None else place, []).append(place)
    listed = list(groups.values())
    size = max(map(len, listed), default=1)
    count = max(1, most // size)
    stride = max(1, -(-len(listed) // count))
    chosen = [place for members in listed[::stride] for place in members]
    return sorted(chosen[:most])


def row_of(
    document: Rollout, score: DocumentScore | None, reader: Reader | None, step: int, documents_seen: int, tokens: bool
) -> dict[str, Any]:
    """Return the row of a document. `documents_seen` is the count before the step; `tokens` adds per-token values."""
    mask = document.loss_mask
    labels = np.flatnonzero(mask)
    first = int(labels[0]) if len(labels) else document.num_tokens
    row: dict[str, Any] = {
        "step": step,
        "id": cut(document.id, NAME),
        "group_id": None if document.group_id is None else cut(document.group_id, NAME),
        "reward": document.reward,
        "rewards": list(document.rewards.items()),
        "length": len(labels),
        "tokens": document.num_tokens,
        "truncated": document.truncated,
    }
    if reader is not None:
        row |= _texts(document, reader)
    if document.turns:
        row["ended_by"] = facts_of(document.metadata).ended_by
        row["turns"] = None if reader is None else blocks_of(document, reader)
    if not len(labels):
        return row
    row["fields"] = [
        *((name, float(values[mask].mean(dtype=np.float64))) for name, values in document.fields.items()),
        *((name, float(value)) for name, value in document.document_fields.items()),
    ]
    if document.advantages is not None:
        row["advantage"] = float(document.advantages[mask].mean(dtype=np.float64))
    if document.model_version is not None:
        row["model_version"] = int(document.model_version[first])
        row["staleness"] = documents_seen - int(document.model_version[first])
    if score is not None:
        row |= _scored(document, score, reader, tokens)
    return row


def _texts(document: Rollout, reader: Reader) -> dict[str, str]:
    """Return the prompt and the completion as texts. Further sequences follow the completion, each under a heading."""
    texts = []
    for sequence in document.sequences:
        labels = np.flatnonzero(sequence.loss_mask)
        first = int(labels[0]) if len(labels) else sequence.num_tokens
        texts.append((reader.text(sequence.input_ids[:first], False), reader.text(sequence.input_ids[first:], True)))
    (prompt, completion), *others = texts
    for number, (before, after) in enumerate(others, start=2):
        completion += f"\n\n--- sequence {number} of {len(texts)} ---\n{before}\n{after}"
    return {"prompt": prompt, "completion": cut(completion, reader.longest)}


def _scored(document: Rollout, score: DocumentScore, reader: Reader | None, tokens: bool) -> dict[str, Any]:
    """Return the columns computed from the policy's log-probs and entropy before the step's update."""
    mask = document.loss_mask
    row: dict[str, Any] = {"entropy": float(score.entropy.mean(dtype=np.float64))}
    log_ratio = None
    if document.logprobs is not None:
        log_ratio = score.logprobs.astype(np.float64) - document.logprobs[mask].astype(np.float64)
        row["log_ratio"] = float(log_ratio.mean())
        row["largest_log_ratio"] = float(np.abs(log_ratio).max())
    if tokens and reader is not None:
        pieces = reader.pieces(document.input_ids[mask])
        row["token_texts"] = [cut(piece, 1000) for piece in pieces]
        row["token_logprobs"] = score.logprobs[: len(pieces)].tolist()
        if log_ratio is not None:
            row["token_log_ratios"] = log_ratio[: len(pieces)].tolist()
        if document.advantages is not None:
            advantages = document.advantages[mask]
            if np.ptp(advantages):  # equal advantages are already in the column `advantage`
                row["token_advantages"] = advantages[: len(pieces)].tolist()
    return row


def rejected_row(record: Rejected, step: int, longest: int) -> dict[str, Any]:
    """Return the row of a rejected completion. `step` is the step it was sampled for."""
    return {
        "step": step,
        "id": None if record.id is None else cut(record.id, NAME),
        "group_id": None if record.group_id is None else cut(record.group_id, NAME),
        "prompt": None if record.prompt is None else cut(record.prompt, longest),
        "completion": None if record.completion is None else cut(record.completion, longest),
        "rejected": cut(record.reason, 1000),
    }
