"""Expert parallelism: each rank has some of the experts of every layer. An expert is not cut."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from truestep.model.experts.grouped import GroupedExperts, is_experts
from truestep.model.experts.over_ranks import ExpertRanks
from truestep.ranks.group import Ranks
from truestep.weights.errors import ModelError
from truestep.weights.pieces import WeightSlice

AXIS = "expert"


def check_division(model: Any, ranks: int) -> None:
    """Refuse a model whose experts cannot be divided over ranks. Its weights may be unread."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not found:
        raise _refusal(ranks, f"{type(model).__name__} has no experts that truestep recognises")
    for name, module in found.items():
        if module.num_experts % ranks:
            raise _refusal(ranks, f"{ranks} ranks do not divide the {module.num_experts} experts of {name}")


def _refusal(ranks: int, reason: str) -> ModelError:
    return ModelError(f"parallel.expert: {ranks}: {reason}")


def divide_experts(model: Any, ranks: Ranks, pieces: Mapping[str, WeightSlice]) -> dict[str, WeightSlice]:
    """Replace the experts of a model with unread weights by those of this rank, in place. Return `pieces` with the cuts
    added."""
    group, divided = ranks.group(AXIS), dict(pieces)
    assert group is not None
    together = ExpertRanks(group)
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        if not isinstance(module, GroupedExperts):
            raise _refusal(ranks.expert, f"the experts of {type(model).__name__} are computed by its own code alone")
        module.ranks = together
        for own, uncut in list(module.named_parameters(recurse=False)):
            piece = divided[f"{name}.{own}"] = replace(pieces[f"{name}.{own}"], cut={AXIS: 0})
            part = piece.slice(uncut.detach(), ranks)
            setattr(module, own, torch.nn.Parameter(part, requires_grad=uncut.requires_grad))
    return divided
