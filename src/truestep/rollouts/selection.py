"""The selection of documents before a step: truncated documents and groups whose advantages are all 0."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from truestep.rollouts.fields import of_labels
from truestep.types import PutAside, Rollout

NO_DIFFERENCE = "all advantages of its group are 0 (data.zero_advantage: replace)"
TRUNCATED = "it ended at a length limit (data.truncated: drop)"


def choose_truncated(rollouts: Iterable[Rollout], rule: str) -> tuple[list[Rollout], list[PutAside]]:
    """Keep, mask or drop the documents that ended at a length limit, by `data.truncated`.

    The group baselines already include the rewards of dropped documents. Documents with unknown `truncated` are kept.
    """
    chosen: list[Rollout] = []
    put_aside: list[PutAside] = []
    for rollout in rollouts:
        if not rollout.truncated or rule == "keep":
            chosen.append(rollout)
        elif rule == "mask":
            chosen.append(_without_labels(rollout))
        else:
            put_aside.append(PutAside(rollout.id, TRUNCATED, rollout.group_id))
    return chosen, put_aside


def _without_labels(rollout: Rollout) -> Rollout:
    """Return a document without labels. It still counts as a document but adds nothing to the loss."""
    names = {field.name for field in of_labels()} | set(rollout.fields)
    values = {name: value for name in names if (value := rollout.value(name)) is not None}
    # Fields of labels are 0 where the mask is 0.
    masked = rollout.with_values({name: np.zeros_like(value) for name, value in values.items()})
    return replace(masked, loss_mask=np.zeros_like(rollout.loss_mask))


def has_advantage(rollout: Rollout) -> bool:
    """Return whether any label's advantage is not 0."""
    return rollout.advantages is not None and bool(rollout.advantages.any())


def put_group_aside(group: Sequence[Rollout]) -> list[PutAside]:
    return [PutAside(rollout.id, NO_DIFFERENCE, rollout.group_id) for rollout in group]
