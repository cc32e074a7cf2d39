"""A compiler pass for training: replaces QK norm and RoPE by one function with a fused backward pass.

The function is `rms_norm.turned_norm`. RoPE is recognised by what it computes, not by its name."""

from collections.abc import Sequence
from typing import Any

import torch

from truestep.model.fast import rms_norm as norms

_HEADS, _TOKENS = 3, 5  # heads and tokens in the trial computation


def norm_and_turn(module: torch.fx.GraphModule) -> None:
    """Replace each norm of heads and its RoPE by `turned_norm`, before the backward pass is traced."""
    found = [(normed, _turned(normed)) for normed in module.graph.find_nodes(op="call_function", target=norms.norm)]
    for normed, turns in found:
        if turns is not None:
            _replace(module.graph, normed, *turns)
    if any(turns is not None for _, turns in found):
        module.recompile()


def _turned(normed: torch.fx.Node) -> tuple[list[torch.fx.Node], torch.fx.Node, torch.fx.Node] | None:
    """Return the nodes that apply RoPE to a norm's output, and their cosine and sine nodes; None if there are none."""
    if normed.meta["example_value"].ndim != 4 or normed.meta["example_value"].shape[0] != 1:
        return None
    heads = next(iter(normed.users)) if len(normed.users) == 1 else None
    if heads is None or heads.target != "transpose" or tuple(heads.args[1:]) not in ((1, 2), (2, 1)):
        return None
    inside = _until_joined(heads)
    if inside is None:
        return None
    inputs = list(dict.fromkeys(node for each in inside for node in each.all_input_nodes))
    outside = [node for node in inputs if node not in inside and node is not heads]
    size = normed.meta["example_value"].shape[-1]
    if len(outside) != 2 or not all(_is_turn(node, size) for node in outside):
        return None
    for cosine, sine in (outside, outside[::-1]):
        if _turns(heads, inside, cosine, sine, size):
            return [heads, *inside], cosine, sine
    return None


def _until_joined(heads: torch.fx.Node) -> list[torch.fx.Node] | None:
    """List the nodes that depend on `heads`, in order, up to the first node in which all of them end."""
    inside: list[torch.fx.Node] = []
    open_ends = set(heads.users)
    node = heads.next
    while open_ends and node.op != "output":
        if node in open_ends:
            inside.append(node)
            open_ends.remove(node)
            if not open_ends:
                return inside
            open_ends |= set(node.users)
        node = node.next
    return None


def _is_turn(node: torch.fx.Node, size: int) -> bool:
    shape: Any = getattr(node.meta.get("example_value"), "shape", ())
    return len(shape) == 4 and shape[0] == 1 and shape[1] == 1 and shape[3] == size


def _turns(
    heads: torch.fx.Node, inside: Sequence[torch.fx.Node], cosine: torch.fx.Node, sine: torch.fx.Node, size: int
) -> bool:
    """Tell whether the nodes `inside` compute the same as `rms_norm.turned` on random values."""
    alone = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for number, node in enumerate((heads, cosine, sine)):
        copies[node] = alone.placeholder(f"given_{number}")
    for node in inside:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(copies[inside[-1]])
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = random(1, _HEADS, _TOKENS, size), random(1, 1, _TOKENS, size), random(1, 1, _TOKENS, size)
    try:
        found: Any = torch.fx.GraphModule(torch.nn.Module(), alone)(*given)
    except Exception:  # the nodes expect other sizes
        return False
    return isinstance(found, torch.Tensor) and torch.equal(found, norms.turned(*given))


def _replace(
    graph: torch.fx.Graph,
    normed: torch.fx.Node,
    inside: Sequence[torch.fx.Node],
    cosine: torch.fx.Node,
    sine: torch.fx.Node,
) -> None:
    x, weight, *constants = normed.args
    last = inside[-1]
    with graph.inserting_before(last):
        found = graph.call_function(norms.turned_norm, (x, weight, cosine, sine, *constants))
        found.meta.update(last.meta)
    last.replace_all_uses_with(found)
    # No `eliminate_dead_code`: nodes that change a tensor in place have no readers either.
    for node in (*reversed(inside), normed):
        graph.erase_node(node)
