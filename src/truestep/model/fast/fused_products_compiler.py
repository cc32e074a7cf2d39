"""Compiler passes for torch.compile that fuse products of the same input. Importing this module takes a second."""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import ir
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.lowering import register_lowering
from torch.utils.checkpoint import CheckpointPolicy

from truestep.model.fast import fused_products as joined
from truestep.model.fast import gradient_accumulation as adding
from truestep.model.fast import qk_norm_rope as turned
from truestep.model.fast import rms_norm as norms
from truestep.model.fast.fused_products import result_of
from truestep.model.fast.qk_norm_rope import turn_in_one
from truestep.model.fast.qk_norm_rope_backward import norm_and_turn

aten, OURS = torch.ops.aten, torch.ops.truestep


class Join(CustomGraphPass):
    """Replaces products of the same input by one operator, and fuses a single product with the addition that reads
    it."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        groups: dict[Any, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        for node in graph.nodes:
            weight = _weight_of(node)
            if weight is not None:
                groups.setdefault(_rows_of(node), []).append((node, weight))
        for products in groups.values():
            if len(products) > 1:
                turn_in_one(graph, *_join(graph, products))
            else:
                _add_in_product(graph, *products[0])

    def uuid(self) -> Any:
        files = __file__, joined.__file__, adding.__file__, norms.__file__, turned.__file__
        return type(self).__name__, get_hash_for_files(files)


def _weight_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the weight of a product by a weight's transpose; None for other nodes."""
    if node.target is not aten.mm.default or node.kwargs:
        return None
    right = node.args[1]
    if not isinstance(right, torch.fx.Node) or right.target is not aten.permute.default or right.args[1] != [1, 0]:
        return None
    weight = right.args[0]
    return weight if isinstance(weight, torch.fx.Node) and weight.op == "placeholder" else None


def _rows_of(product: torch.fx.Node) -> Any:
    """Return a key of a product's input that is equal for the same input: each product has its own reshaped view."""
    rows: Any = product.args[0]
    if rows.target is aten.reshape.default or rows.target is aten.view.default:
        return rows.args[0], str(rows.args[1])
    return rows


def _join(
    graph: torch.fx.Graph, products: Sequence[tuple[torch.fx.Node, torch.fx.Node]]
) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """Replace products by one operator. Return its node, and the slices of its result."""
    parts = []
    rows: Any = products[0][0].args[0]
    weights = [weight for _, weight in products]
    with graph.inserting_before(products[0][0]):
        whole = graph.call_function(OURS.joined_product.default, (rows, weights))
        whole.meta["val"] = result_of(rows.meta["val"], [weight.meta["val"] for weight in weights])
        start = 0
        for product, weight in products:
            end = start + weight.meta["val"].shape[0]
            part = graph.call_function(aten.slice.Tensor, (whole, 1, start, end))
            part.meta["val"] = whole.meta["val"][:, start:end]
            product.replace_all_uses_with(part)
            parts.append(part)
            start = end
    for product, _ in products:
        graph.erase_node(product)
    return whole, parts


def _add_in_product(graph: torch.fx.Graph, product: torch.fx.Node, weight: torch.fx.Node) -> None:
    """Fuse a product with an addition, if only that addition reads the product."""
    chain = [product]
    while len(chain[-1].users) == 1 and next(iter(chain[-1].users)).target in _VIEWS:
        chain.extend(chain[-1].users)
    made = chain[-1]
    total = next(iter(made.users)) if len(made.users) == 1 else None
    if total is None or not _is_sum(total):
        return
    onto = next(node for node in total.args if node is not made)
    if not isinstance(onto, torch.fx.Node) or not _is_sum(onto) or _what(onto) != _what(made):
        return
    with graph.inserting_before(total):
        # The rows are a sum themselves, and are computed twice: torch does not fuse other reads with a buffer that is
        # changed later. So the first copy is never written, and the kernel of its norm writes the second copy.
        again = graph.call_function(onto.target, onto.args)  # type: ignore[arg-type]
        again.meta["val"] = total.meta["val"]
        given = {"onto": again, "a": product.args[0], "weight": weight}
        changed = graph.call_function(auto_functionalized, (OURS.add_product_.default,), given)
        changed.meta["val"] = None, total.meta["val"]
        found = graph.call_function(operator.getitem, (changed, 1))
        found.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(found)
    for node in (total, *reversed(chain)):
        graph.erase_node(node)


def _what(node: torch.fx.Node) -> Any:
    return node.meta["val"].shape, node.meta["val"].dtype, node.meta["val"].is_contiguous()


class JoinBackward(Join):
    """Fuses products whose results are summed to one gradient, in training. Forward products are not fused: with many
    rows this gains little, and reading a slice of a wide result is slower. `parts`: split the gradients of a product's
    input and of its weight into two operators."""

    def __init__(self, parts: bool = False) -> None:
        super().__init__()
        self._parts = parts

    def __call__(self, graph: torch.fx.Graph) -> None:
        groups: dict[Any, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            if node.target is OURS.linear_backward.default:
                groups.setdefault(node.args[1], []).append(node)
        places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        for products in groups.values():
            products.sort(key=lambda product: places.get(product.args[2], -1))  # in the forward pass's order
            total = _total(products) if len(products) > 1 else None
            if total is not None:
                _join_backward(graph, products, total)
        for norm in graph.find_nodes(op="call_function", target=OURS.norm_backward.default):
            _add_what_else_flows(graph, norm)
        for together in graph.find_nodes(op="call_function", target=OURS.side_by_side.default):
            _make_heads_there(graph, together)
        if self._parts:
            _part(graph)

    def uuid(self) -> Any:
        return *super().uuid(), self._parts


def _total(products: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """Return the node that sums all of the products; None if a product has other readers."""
    parts = set(products)
    while len(parts) > 1:
        alone = {part for part in parts if len(part.users) == 1}
        user = next((user for part in alone for user in part.users if _adds(user, alone)), None)
        if user is None:
            return None
        parts = (parts - set(user.args)) | {user}
    return parts.pop()


def _adds(node: torch.fx.Node, parts: set[torch.fx.Node]) -> bool:
    """Tell whether a node adds two of the parts. The parts passed have no other reader."""
    return _is_sum(node) and set(node.args) <= parts


def _is_sum(node: torch.fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and len(set(node.args)) == 2


def _join_backward(graph: torch.fx.Graph, products: Sequence[torch.fx.Node], total: torch.fx.Node) -> None:
    gradients, weights = [product.args[0] for product in products], [product.args[2] for product in products]
    rows, number = products[0].args[1], products[0].args[3]
    with graph.inserting_before(total):  # all inputs exist here
        together = graph.call_function(OURS.side_by_side.default, (gradients,))
        together.meta["val"] = torch.cat([gradient.meta["val"] for gradient in gradients], -1)  # type: ignore[union-attr]
        joined = graph.call_function(OURS.joined_backward.default, (together, rows, weights, number, []))
        joined.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(joined)
    graph.eliminate_dead_code()


def _add_what_else_flows(graph: torch.fx.Graph, norm: torch.fx.Node) -> None:
    """Fuse the kernel of a norm's gradient with the addition that reads it, if that is the only reader: the other
    operand is the residual's gradient."""
    if len(norm.users) != 1:
        return
    total = next(iter(norm.users))
    if total.target is not aten.add.Tensor or total.kwargs:
        return
    others = [node for node in total.args if node is not norm]
    if len(others) != 1 or not isinstance(others[0], torch.fx.Node):
        return
    made, other = norm.meta["val"], others[0].meta["val"]
    if other.dtype != made.dtype or other.shape != made.shape:
        return
    gradient, x, weight, _, *constants = norm.args
    with graph.inserting_before(total):
        found = graph.call_function(OURS.norm_backward.default, (gradient, x, weight, others[0], *constants))
        found.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(found)
    graph.erase_node(total)
    graph.erase_node(norm)


_VIEWS = aten.reshape.default, aten.view.default, aten._unsafe_view.default


def _make_heads_there(graph: torch.fx.Graph, together: torch.fx.Node) -> None:
    """Replace a concatenation of heads' gradients by an operator whose kernels write directly to the result."""
    given: Any = together.args[0]
    made: list[torch.fx.Node] = []
    for part in given:
        node = part
        while node.target in _VIEWS and len(node.users) == 1:
            node = node.args[0]
        if node.target is not OURS.heads_backward.default or len(node.users) != 1:
            break
        made.append(node)
    if not made or together.meta["val"].ndim != 3:
        return
    others = given[len(made) :]
    with graph.inserting_before(together):
        columns = [list(column) for column in zip(*(node.args for node in made), strict=True)]
        whole = graph.call_function(OURS.heads_side_by_side.default, (*columns, others))
        whole.meta["val"] = together.meta["val"]
    together.replace_all_uses_with(whole)
    graph.erase_node(together)
    graph.eliminate_dead_code()


def _part(graph: torch.fx.Graph) -> None:
    """Split the backward pass of each product but the last into two operators: the input's gradient and the weight's.
    Rows recomputed for the weight's gradient can then be computed by a later kernel that reads the same values."""
    whole = OURS.linear_backward.default, OURS.joined_backward.default
    products = [node for node in graph.nodes if node.target in whole]
    matrices: list[torch.fx.Node] = []  # nothing reads their empty results: the last operator takes them as inputs
    for product in products:
        gradient, rows, weights, number, *_ = product.args
        weights = weights if isinstance(weights, (list, tuple)) else [weights]
        with graph.inserting_before(product):
            if product is products[-1]:
                arguments = (gradient, rows, weights, number, matrices)
                found = graph.call_function(OURS.joined_backward.default, arguments)
            else:
                found = graph.call_function(OURS.rows_backward.default, (gradient, weights))
                matrices.append(graph.call_function(OURS.matrices_backward.default, (gradient, rows, weights, number)))
                matrices[-1].meta["val"] = rows.meta["val"].new_empty(0)
        found.meta["val"] = product.meta["val"]
        product.replace_all_uses_with(found)
        graph.erase_node(product)


@register_lowering(OURS.side_by_side.default, type_promotion_kind=None)
def _lay_side_by_side(parts: list[Any]) -> Any:
    # Each part's kernel writes to the result. torch's lowering of `cat` may make one kernel for all parts, which reads
    # every part's inputs for each element.
    return ir.TensorBox(ir.ConcatKernel.create(parts, len(parts[0].get_size()) - 1))


class Remake(CustomGraphPass):
    """Allows recomputing `cat`, with which RoPE rotates queries and keys; torch does not recompute it by default."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.cat.default):
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE

    def uuid(self) -> Any:
        return type(self).__name__, get_hash_for_files((__file__,))


@cache  # torch recompiles for another backend object
def sampling_backend(backend: Any, rounds: bool = False) -> Callable[..., Any] | Any:
    """Return a torch.compile backend with fused products for sampling; backends other than inductor are returned
    unchanged. `rounds`: round intermediate values where the model's own code does."""
    if backend != "inductor":
        return backend
    return _compiling(post_grad_custom_pre_pass=Join(), emulate_precision_casts=rounds)


@cache
def training_backend(backend: Any, remakes: bool) -> Callable[..., Any] | Any:
    """Return a torch.compile backend for training. `remakes`: keep the outputs of products and attention for the
    backward pass, and recompute norms and elementwise operations. By default torch keeps inputs of products."""
    if backend != "inductor":
        return backend
    remaking = {"joint_custom_pre_pass": Remake()} if remakes else {}
    compile_graph = _compiling(post_grad_custom_pre_pass=JoinBackward(parts=remakes), **remaking)

    def compile_parted(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        norm_and_turn(module)
        with functorch.patch(ban_recompute_materialized_backward=not remakes):
            return compile_graph(module, inputs)

    return compile_parted


def _compiling(**options: Any) -> Callable[..., Any]:
    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled: Any = compile_fx(module, inputs, config_patches=options)
        return compiled

    return compile_graph
