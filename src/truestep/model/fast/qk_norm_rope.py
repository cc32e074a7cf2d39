"""QK norm and RoPE of queries and keys in one kernel, while a model samples.

The compiler makes one kernel for queries and one for keys. For a few hundred tokens the launches dominate, so here one
kernel does both. A compiler pass finds the code by what it computes: the first parts of a fused product (see
`fused_products`), on which the graph's nodes compute bit for bit an optional norm and RoPE as transformers does. Like
other compiled code, the kernel keeps intermediate values in float32, where a model's own code rounds.

Dimensions: T tokens, N width of a token's row, A heads, E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from truestep.gpu.operators import operator
from truestep.gpu.self_test import serves
from truestep.model.fast import rms_norm as norms

aten = torch.ops.aten

_UNSQUEEZE = aten.unsqueeze.default
_TOKENS = 5  # tokens in the trial computation
_KINDS = 2  # the kernel handles at most queries and keys


@operator(
    "turned_heads(Tensor rows, int[] heads, Tensor[] weights, Tensor[] epsilons, float[] constants, float offset,"
    " Tensor cosine, Tensor sine) -> Tensor",
    lambda rows, heads, *given: rows.new_empty(rows.shape[0], sum(heads), given[-1].shape[-1]),
)
def turned_heads(
    rows: torch.Tensor,
    heads: list[int],
    weights: list[torch.Tensor],
    epsilons: list[torch.Tensor],
    constants: list[float],
    offset: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> torch.Tensor:  # [T, N], .., [.., T, E] -> [T, A, E]
    """Apply the norm (if there are weights) and RoPE to the heads at the start of each row."""
    cosine, sine = (turns.reshape(-1, turns.shape[-1]) for turns in (cosine, sine))
    found = [float(epsilon) for epsilon in epsilons] or constants
    if rows.device.type == "cuda" and kernel_serves(rows.device, rows.dtype):
        from truestep.model.fast.qk_norm_rope_kernel import turn

        return turn(rows, heads, weights, found, offset, cosine, sine)
    return turn_plainly(rows, heads, weights, found, offset, cosine, sine)


def turn_plainly(
    rows: torch.Tensor,
    heads: Sequence[int],
    weights: Sequence[torch.Tensor],
    epsilons: Sequence[float],
    offset: float,
    cosine: torch.Tensor,
    sine: torch.Tensor,
) -> torch.Tensor:
    size = cosine.shape[-1]
    parts = rows[:, : sum(heads) * size].unflatten(1, (-1, size)).split(list(heads), 1)
    if weights:
        form = norms.FROM_ONE if offset else norms.ROUNDED_LAST
        given = zip(parts, weights, epsilons, strict=True)
        parts = tuple(norms.compute(part, weight, epsilon, form) for part, weight, epsilon in given)
    return norms.turned(torch.cat(parts, 1), cosine[:, None], sine[:, None]).to(rows.dtype)


@cache
def kernel_serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the kernel agrees with plain torch on a device."""
    return serves("the kernel that turns heads", "plain torch does", lambda: wrong_on(device, dtype))


def wrong_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Describe the first case that the kernel computes wrongly on a device; None if there is none."""
    from truestep.model.fast.qk_norm_rope_kernel import turn

    generator = torch.Generator().manual_seed(0)
    for tokens, heads, size in ((1, (2, 1), 64), (37, (16, 8), 128), (70, (7,), 96), (3, (40, 10), 256)):

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        rows, cosine, sine = random(tokens, (sum(heads) + 2) * size), random(tokens, size), random(tokens, size)
        weights, epsilons = [random(size) for _ in heads], [0.01 * (1 + number) for number in range(len(heads))]
        for given, offset in (([], 0.0), (weights, 0.0), (weights, 1.0)):
            found = turn(rows, heads, given, epsilons if given else [], offset, cosine, sine)
            parts = rows.double()[:, : sum(heads) * size].unflatten(1, (-1, size)).split(heads, 1)
            normed = [
                part * torch.rsqrt(part.square().mean(-1, keepdim=True) + epsilon) * (offset + weight.double())
                for part, weight, epsilon in zip(parts, given, epsilons, strict=False)
            ]
            turns = cosine.double()[:, None], sine.double()[:, None]
            right = norms.turned(torch.cat(normed or list(parts), 1), *turns)
            if not torch.allclose(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5):
                return f"{tokens} tokens of {heads} heads of {size} numbers, weights from {offset}"
    return None


@dataclass(frozen=True)
class _Kind:
    """The norm and RoPE of a layer's queries, or of its keys, in a graph."""

    last: torch.fx.Node
    heads: int
    weight: torch.fx.Node | None
    epsilon: torch.fx.Node | float | None
    offset: float
    turns: tuple[torch.fx.Node, torch.fx.Node]


def turn_in_one(graph: torch.fx.Graph, whole: torch.fx.Node, parts: Sequence[torch.fx.Node]) -> None:
    """Replace the norm and RoPE of a fused product's first parts by one operator, if the graph has them."""
    kinds: list[_Kind] = []
    for part in parts[:_KINDS]:
        found = _kind(part)
        if found is None or (kinds and not _alike(kinds[0], found)):
            break
        kinds.append(found)
    if kinds:
        _replace(graph, whole, kinds)


def _source(node: torch.fx.Node, *steps: Any) -> torch.fx.Node:
    """Follow first inputs upwards from a node, through nodes whose target is in `steps`."""
    while node.target in steps:
        node = node.all_input_nodes[0]
    return node


def _alike(one: _Kind, other: _Kind) -> bool:
    same = one.turns == other.turns and one.offset == other.offset
    return same and type(one.epsilon) is type(other.epsilon) and (one.weight is None) == (other.weight is None)


def _kind(part: torch.fx.Node) -> _Kind | None:
    """Recognise the norm and RoPE of a part; None if the part is used for anything else."""
    inside = _made_of(part)
    if not inside:
        return None
    outside = [node for each in inside for node in each.all_input_nodes if node is not part and node not in inside]
    outside = list(dict.fromkeys(outside))
    tensors = [node for node in outside if isinstance(node.meta.get("val"), torch.Tensor)]
    by_rank: dict[int, list[torch.fx.Node]] = {}
    for node in tensors:
        by_rank.setdefault(node.meta["val"].ndim, []).append(node)
    weights, epsilons = by_rank.pop(1, []), by_rank.pop(0, [])
    turns = [node for nodes in by_rank.values() for node in nodes]
    if len(turns) != 2 or len(weights) > 1 or len(epsilons) > 1:
        return None
    weight = weights[0] if weights else None
    epsilon: torch.fx.Node | float | None = epsilons[0] if epsilons else _constant(inside)
    if weight is not None and epsilon is None:
        return None
    for cosine, sine in (turns, turns[::-1]):
        with _disable_current_modes():  # leave the compiler's fake mode, to compute real values
            kind = _tried(part, inside, outside, weight, epsilon, (cosine, sine))
        if kind is not None:
            return kind
    return None


def _made_of(part: torch.fx.Node) -> list[torch.fx.Node]:
    """List the nodes that depend on a part, in order. Empty unless the last one alone is a graph output."""
    inside: list[torch.fx.Node] = []
    reached = {part}
    node = part.next
    while node.op != "output":
        if any(given in reached for given in node.all_input_nodes):
            reached.add(node)
            inside.append(node)
        node = node.next
    ends = [node for node in inside if any(user.op == "output" for user in node.users)]
    return inside if ends == inside[-1:] else []


def _constant(inside: Sequence[torch.fx.Node]) -> float | None:
    """Return a norm's epsilon if the graph has it as a constant."""
    added = [arg for node in inside if "add" in str(node.target) for arg in node.args if isinstance(arg, float)]
    return added[0] if len(added) == 1 else None


def _tried(
    part: torch.fx.Node,
    inside: Sequence[torch.fx.Node],
    outside: Sequence[torch.fx.Node],
    weight: torch.fx.Node | None,
    epsilon: torch.fx.Node | float | None,
    turns: tuple[torch.fx.Node, torch.fx.Node],
) -> _Kind | None:
    """Run the nodes `inside` on random values. Return the kind if the result equals RoPE with or without a norm."""
    value, size = part.meta["val"], turns[0].meta["val"].shape[-1]
    width = value.shape[1]
    if not isinstance(size, int) or size % 2 or width % size:
        return None
    generator = torch.Generator().manual_seed(0)

    def random(like: torch.fx.Node | None, *shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator)
        return made if like is None else made.to(like.meta["val"].dtype)

    x, scale = random(part, _TOKENS, width), random(weight, size)
    cosine, sine = (random(node, _TOKENS, size) for node in turns)
    tried = epsilon if isinstance(epsilon, float) else 0.05
    alone = torch.fx.Graph()
    copies = {part: alone.placeholder("given")}
    given: list[Any] = [x]
    numbers = {weight: scale, epsilon: torch.tensor(tried, dtype=torch.float64), turns[0]: cosine, turns[1]: sine}
    for node in outside:
        copies[node] = alone.placeholder(f"given_{len(given)}")
        if node in turns:
            rank = node.meta["val"].ndim
            given.append(numbers[node].view(*(1,) * (rank - 2), _TOKENS, size))
        else:
            given.append(numbers.get(node, _TOKENS))
    for node in inside:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(copies[inside[-1]])
    try:
        found: Any = torch.fx.GraphModule(torch.nn.Module(), alone)(*given)
    except Exception:  # the nodes expect other inputs
        return None
    heads = x.view(1, _TOKENS, -1, size)
    forms = [None] if weight is None else range(len(norms.FORMS))
    for form in forms:
        normed = heads if form is None else norms.compute(heads, scale, tried, form)
        right = norms.turned(normed.transpose(1, 2), cosine, sine)
        same = isinstance(found, torch.Tensor) and found.dtype == right.dtype == value.dtype
        if same and found.shape == right.shape and torch.equal(found, right):
            sources = _source(turns[0], _UNSQUEEZE), _source(turns[1], _UNSQUEEZE)
            return _Kind(inside[-1], heads.shape[2], weight, epsilon, float(form == norms.FROM_ONE), sources)
    return None


def _replace(graph: torch.fx.Graph, whole: torch.fx.Node, kinds: Sequence[_Kind]) -> None:
    heads = [kind.heads for kind in kinds]
    weights = [kind.weight for kind in kinds if kind.weight is not None]
    nodes = [kind.epsilon for kind in kinds if isinstance(kind.epsilon, torch.fx.Node) and weights]
    epsilons = [_source(node, torch.ops.prims.convert_element_type.default) for node in nodes]  # float() reads them
    constants = [kind.epsilon for kind in kinds if isinstance(kind.epsilon, float) and weights]
    cosine, sine = kinds[0].turns
    value = whole.meta["val"]

    def add(target: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(target, args)
        values = torch.fx.map_arg(args, lambda given: given.meta["val"])
        node.meta["val"] = target(*values)
        return node

    with graph.inserting_before(graph.output_node()):  # only the graph's output reads the results
        operator = torch.ops.truestep.turned_heads.default
        given = whole, heads, weights, epsilons, constants, kinds[0].offset, cosine, sine
        found = graph.call_function(operator, given)
        found.meta["val"] = value.new_empty(value.shape[0], sum(heads), cosine.meta["val"].shape[-1])
        start = 0
        for kind in kinds:
            end = start + kind.heads
            own = add(aten.unsqueeze.default, add(aten.slice.Tensor, found, 1, start, end), 0)
            own = add(aten.permute.default, own, [0, 2, 1, 3])
            kind.last.replace_all_uses_with(own)
            start = end
    graph.eliminate_dead_code()
