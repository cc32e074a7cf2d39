"""Part of a real vLLM on a CPU: packs reloaded experts as its kernels read them, and tells checksums of experts.

vLLM 0.32 packs the experts' weights for its CPU kernels when it starts. When it reloads them it does not, so that the
kernels read numbers of other rows and columns, with or without a trainer. `register`, a plugin, has it pack them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch


def checksum(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()


def each_expert(layer: str, gate_up: torch.Tensor, down: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the matrices of each expert of a layer, by the names that checkpoints give them. [E, 2I, H], [E, H, I]."""
    for number, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = first.chunk(2)
        yield f"{layer}.{number}.gate_proj", gate
        yield f"{layer}.{number}.up_proj", up
        yield f"{layer}.{number}.down_proj", second


class ExpertChecksums:
    """An extension of vLLM's worker: `/collective_rpc` calls its methods."""

    model_runner: Any

    def expert_checksums(self) -> dict[str, str]:
        """Return the checksum of each expert's matrices, from the tensors that the kernels read."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        sums = {}
        for name, layer in self.model_runner.get_model().named_modules():
            if isinstance(layer, RoutedExperts):
                isa = layer.quant_method.moe_kernel.fused_experts.isa
                weights = (_unpacked(weight, isa) for weight in (layer.w13_weight, layer.w2_weight))
                experts = name.removesuffix(".routed_experts")
                sums |= {key: checksum(weight) for key, weight in each_expert(experts, *weights)}
        return sums


def _unpacked(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Undo vLLM's packing, which is found out by having it pack the numbers of the places."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    places = torch.arange(weight[0].numel(), dtype=torch.float32)
    assert weight.dtype == torch.float32 and len(places) < 2**24, "places are exact in float32"
    packed = cpu_prepack_moe_weight(places.view(1, *weight.shape[1:]), isa).flatten().long()
    found = torch.empty_like(weight)
    found.flatten(1)[:, packed] = weight.flatten(1)
    return found


def register() -> None:
    """vLLM calls this in each of its processes."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(method: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        reloads = method.moe_kernel is not None
        set_up(method, layer, w13, w2)
        if reloads:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
