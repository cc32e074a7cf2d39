"""Backends of torch.compile for layers. Importing this module takes a second."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering
from torch.utils.checkpoint import CheckpointPolicy

from truestep.model.fast import gradient_accumulation as accumulation


@register_lowering(torch.ops.truestep.side_by_side.default, type_promotion_kind=None)
def _lay_side_by_side(parts: list[Any]) -> Any:
    # Each part's kernel writes to the result. torch's lowering of `cat` may make one kernel for all parts, which reads
    # every part's inputs for each element.
    return ir.TensorBox(ir.ConcatKernel.create(parts, len(parts[0].get_size()) - 1))


class RecomputeCat(CustomGraphPass):
    """Allows recomputing `cat`, with which RoPE rotates queries and keys; torch does not recompute it by default."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE

    def uuid(self) -> Any:
        return type(self).__name__, get_hash_for_files((__file__, accumulation.__file__))


@cache  # torch recompiles for another backend object
def rounding_backend(backend: Any) -> Callable[..., Any] | Any:
    """Return a backend that rounds intermediate values where the model's own code does. Backends other than inductor
    are returned unchanged."""
    return _compiling(emulate_precision_casts=True) if backend == "inductor" else backend


@cache
def recomputing_backend(backend: Any) -> Callable[..., Any] | Any:
    """Return a backend that keeps the outputs of products and attention for the backward pass, and recomputes norms and
    elementwise operations. By default torch keeps inputs of products. Backends other than inductor are returned
    unchanged."""
    if backend != "inductor":
        return backend
    compile_graph = _compiling(joint_custom_pre_pass=RecomputeCat())

    def compile_recomputing(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with functorch.patch(ban_recompute_materialized_backward=False):
            return compile_graph(module, inputs)

    return compile_recomputing


def _compiling(**options: Any) -> Callable[..., Any]:
    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled: Any = compile_fx(module, inputs, config_patches=options)
        return compiled

    return compile_graph
