"""Torch's compiler with one operator in the place of products of the same rows. Importing it takes a second."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from truestep.sampler.engine import joined
from truestep.sampler.engine.joined import result_of

aten = torch.ops.aten


class Join(CustomGraphPass):
    """Puts the operator in the place of a graph's products of the same rows."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        groups: dict[Any, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        for node in graph.nodes:
            weight = _weight_of(node)
            if weight is not None:
                groups.setdefault(_rows_of(node), []).append((node, weight))
        for products in groups.values():
            if len(products) > 1:
                _join(graph, products)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, joined.__file__))


def _weight_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Give the weight of a product of rows by a weight's transpose; None: the node is none."""
    if node.target is not aten.mm.default or node.kwargs:
        return None
    right = node.args[1]
    if not isinstance(right, torch.fx.Node) or right.target is not aten.permute.default or right.args[1] != [1, 0]:
        return None
    weight = right.args[0]
    return weight if isinstance(weight, torch.fx.Node) and weight.op == "placeholder" else None


def _rows_of(product: torch.fx.Node) -> Any:
    """Tell rows from others: each product has a view of its own of what it is given."""
    rows: Any = product.args[0]
    if rows.target is aten.reshape.default or rows.target is aten.view.default:
        return rows.args[0], str(rows.args[1])
    return rows


def _join(graph: torch.fx.Graph, products: Sequence[tuple[torch.fx.Node, torch.fx.Node]]) -> None:
    rows: Any = products[0][0].args[0]
    weights = [weight for _, weight in products]
    with graph.inserting_before(products[0][0]):
        whole = graph.call_function(torch.ops.truestep.joined_product.default, (rows, weights))
        whole.meta["val"] = result_of(rows.meta["val"], [weight.meta["val"] for weight in weights])
        start = 0
        for product, weight in products:
            end = start + weight.meta["val"].shape[0]
            part = graph.call_function(aten.slice.Tensor, (whole, 1, start, end))
            part.meta["val"] = whole.meta["val"][:, start:end]
            product.replace_all_uses_with(part)
            start = end
    for product, _ in products:
        graph.erase_node(product)


def backend_over(backend: Any) -> Callable[..., Any] | Any:
    """Give what compiles with one product for several, for torch.compile; another compiler than torch's stays as it
    is."""
    return _compile if backend == "inductor" else backend


def _compile(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    compiled: Any = compile_fx(module, inputs, config_patches={"post_grad_custom_pre_pass": Join()})
    return compiled
