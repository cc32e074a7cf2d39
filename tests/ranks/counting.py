"""Counts what a rank sends to others while it computes a step, by the ranks that exchange it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from truestep.config.schema import Config
from truestep.ranks.group import Ranks
from truestep.step.compute.runner import StepRunner
from truestep.tools.score import score


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends, as `plan/volumes.py` counts them, by the name of the group."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.names = {group.group_name: name for name, group in ranks.groups.items()}
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("c10d."):
            self._add(name.split(".")[1].strip("_"), args)
        return found

    def _add(self, kind: str, args: Any) -> None:
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        group = dist.ProcessGroup.unbox(groups[0])
        name, size = self.names.get(group.group_name), group.size()
        if name is None:  # of objects on the host
            return
        tensors = [[leaf for leaf in tree_leaves(arg) if torch.is_tensor(leaf)] for arg in args]
        numbers = [sum(tensor.nbytes for tensor in each) for each in tensors if each]
        share = (size - 1) / size
        sent = {
            "allgather_base": share * numbers[0],
            "allgather": share * numbers[0],
            "allgather_into_tensor_coalesced": share * numbers[0],
            "reduce_scatter_base": share * numbers[-1],
            "reduce_scatter": share * numbers[-1],
            "reduce_scatter_tensor_coalesced": share * numbers[-1],
            "allreduce": 2 * share * numbers[0],
            "allreduce_coalesced": 2 * share * numbers[0],
            "alltoall_base": share * numbers[-1],
            "alltoall": share * numbers[-1],
            "send": float(numbers[0]),
            "recv": 0.0,
            "recv_any_source": 0.0,
            "broadcast": share * numbers[0],
            "barrier": 0.0,
        }[kind]
        self.bytes[f"{name}"] += sent
        self.calls[f"{name} {kind} {numbers}"] += 1


def count_step(config: dict[str, Any], folder: str) -> None:
    """Score a step, and leave what this rank sent in its computation, in a file of the rank's."""
    honest = StepRunner.accumulate
    sent: list[Sent] = []

    def counted(self: StepRunner, *arguments: Any, **options: Any) -> Any:
        ranks = self.policy.weights.ranks
        with Sent(ranks) as mode:
            found = honest(self, *arguments, **options)
        sent.append(mode)
        return found

    StepRunner.accumulate = counted  # type: ignore[method-assign]
    try:
        scored = score(Config.model_validate(config), Path(folder), gradients=True)
    finally:
        StepRunner.accumulate = honest  # type: ignore[method-assign]
    (mode,) = sent
    step = {name: scored.step[name] for name in ("num_micro_batches", "num_tokens", "computed_tokens", "num_labels")}
    told = {"bytes": dict(mode.bytes), "calls": dict(mode.calls), "step": step}
    (Path(folder) / f"sent-{dist.get_rank()}.json").write_text(json.dumps(told))
