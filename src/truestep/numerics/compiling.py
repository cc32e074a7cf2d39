"""Exact arithmetic in torch.compile. Products and sums of a graph are replaced by custom operators that call
`arithmetic`; the compiler does not change these. The rest are elementwise functions, which the compiler may fuse.

Any other operation is refused, as in `operations`.
"""

from collections.abc import Callable
from typing import Any

import torch

from truestep.gpu.operators import operator
from truestep.numerics import arithmetic
from truestep.numerics.operations import InexactError, keeps_rows_apart

aten, prims = torch.ops.aten, torch.ops.prims


@operator("exact_mm(Tensor a, Tensor b) -> Tensor", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return arithmetic.product(a, b.T)


@operator("exact_linear(Tensor a, Tensor weight) -> Tensor", lambda a, weight: a.new_empty(a.shape[0], weight.shape[0]))
def _linear(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return arithmetic.product(a, weight)


@operator(
    "exact_addmm(Tensor bias, Tensor a, Tensor b) -> Tensor", lambda bias, a, b: a.new_empty(a.shape[0], b.shape[1])
)
def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return arithmetic.product(a, b.T, bias)


@operator("exact_mean(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], 1))
def _mean(x: torch.Tensor) -> torch.Tensor:
    return arithmetic.row_mean(x).to(x.dtype).unsqueeze(-1)


@operator("exact_sum(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], 1))
def _sum(x: torch.Tensor) -> torch.Tensor:
    return arithmetic.row_sum(x).to(x.dtype).unsqueeze(-1)


_PRODUCTS: dict[Any, Any] = {
    aten.mm.default: torch.ops.truestep.exact_mm.default,
    aten.addmm.default: torch.ops.truestep.exact_addmm.default,
}
_SUMS: dict[Any, Any] = {
    aten.mean.dim: torch.ops.truestep.exact_mean.default,
    aten.sum.dim_IntList: torch.ops.truestep.exact_sum.default,
}
_KNOWN = {
    *_PRODUCTS.values(),
    torch.ops.truestep.exact_linear.default,
    *_SUMS.values(),
    prims.convert_element_type.default,
    prims.iota.default,
}


def rewrite(graph: torch.fx.Graph) -> None:
    """Replace a graph's products and sums by exact operators; raise InexactError for operations without one."""
    for node in list(graph.nodes):
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target in _KNOWN:
            continue
        if target in _PRODUCTS:
            if node.kwargs:
                raise InexactError(f"a product that is scaled ({target})")
            node.target = _PRODUCTS[target]
            weight = _transposed(node.args[-1])
            # without the transposed view, which the compiler might copy
            if weight is not None and target is aten.mm.default:
                node.target, node.args = torch.ops.truestep.exact_linear.default, (node.args[0], weight)
        elif target in _SUMS:
            _rewrite_sum(graph, node, _SUMS[target])
        elif not (keeps_rows_apart(target) or target.namespace == "truestep" or "sym_" in str(target)):
            raise InexactError(str(target))


def _transposed(node: Any) -> torch.fx.Node | None:
    """Return the input of a transpose; None if this node is not one."""
    if not isinstance(node, torch.fx.Node) or node.target not in (aten.t.default, aten.permute.default):
        return None
    swaps = node.target is aten.t.default or node.args[1] in ([1, 0], (1, 0))
    return node.args[0] if swaps and isinstance(node.args[0], torch.fx.Node) else None


def _rewrite_sum(graph: torch.fx.Graph, node: torch.fx.Node, operator: Any) -> None:
    x, dimensions = node.args[0], node.args[1]
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    assert isinstance(x, torch.fx.Node)
    values = x.meta["val"]
    last = isinstance(dimensions, list | tuple) and [d % values.dim() for d in dimensions] == [values.dim() - 1]
    kind = node.kwargs.get("dtype") or values.dtype
    if not last or kind != values.dtype or not values.is_floating_point():
        raise InexactError(f"a sum over another dimension than the last, or in another type ({node.target})")
    with graph.inserting_before(node):
        found = graph.call_function(operator, (x,))
        found.meta["val"] = node.meta["val"] if keeps else node.meta["val"].unsqueeze(-1)
        if not keeps:
            kept = found
            found = graph.call_function(aten.squeeze.dim, (kept, -1))
            found.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(found)
    graph.erase_node(node)


def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Compile a graph with exact arithmetic, as a backend of torch.compile."""
    from torch._inductor.compile_fx import compile_fx

    # The cache key of compiled graphs does not include `rewrite`, so the cache is off.
    patches = {"post_grad_custom_pre_pass": rewrite, "shape_padding": False, "fx_graph_cache": False}
    compiled: Any = compile_fx(module, inputs, config_patches=patches)
    return compiled
