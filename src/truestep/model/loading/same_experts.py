"""Gives the tokens of two passes the same experts, so that the passes can be compared.

Two ways of computing a layer round differently. Where a router's scores nearly tie, rounding alone decides which
experts compute, and one other expert is an error far above those of rounding. So the routers' results are kept in one
pass, and given to the tokens of the other. What the routers of the other pass compute themselves is compared, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from truestep.model.experts.grouped import is_experts
from truestep.model.experts.routers import routed_in

# The results of each layer's router for all tokens, by the name of the layer's experts: logits, scores and experts.
Routes = dict[str, tuple[torch.Tensor, ...]]


@contextmanager
def routes_kept(model: Any) -> Iterator[Routes]:
    """Keep the results of all routers within the block, of several passes one after the other."""
    routes: Routes = {}

    def keep(name: str, result: Any) -> None:
        if _is_choice(result):
            before = routes.get(name, tuple(part[:0] for part in result))
            routes[name] = tuple(map(torch.cat, zip(before, result, strict=True)))

    with _asked(model, keep):
        yield routes


@contextmanager
def routes_given(model: Any, routes: Routes, part: int = 0) -> Iterator[list[torch.Tensor]]:
    """Let routers give these results within the block, which is one pass. If the tokens are divided over ranks, this
    rank has the tokens of part `part`. Tokens that come after all others, such as padding, get the routers' own
    results. Yields the logits that routers computed less those of `routes`, relative to these, [T] for each layer."""
    apart: list[torch.Tensor] = []

    def give(name: str, own: Any) -> Any:
        if name not in routes or not _is_choice(own):
            return None
        count, total = len(own[0]), len(routes[name][0])
        start = 0 if count >= total else part * count
        given = tuple(each[start : start + count] for each in routes[name])
        apart.append(differences(own[0][: len(given[0])], given[0]))
        return tuple(torch.cat([each, mine[len(each) :]]) for each, mine in zip(given, own, strict=True))

    with _asked(model, give):
        yield apart


def differences(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the difference of each token's values, relative to the size of `theirs`: [T, H], [T, H] -> [T]."""
    return (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1).clamp(min=1e-12)


@contextmanager
def _asked(model: Any, answer: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `answer` with each router's layer and result within the block. What it returns, if not None, is the
    router's result."""
    hooks = [
        router.register_forward_hook(lambda _, __, result, name=name: answer(name, result))
        for name, router in _routers_in(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _routers_in(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield routers with the names of their layers' experts. Beside experts whose router `routed_in` does not know,
    each module may be the router: its result tells."""
    known = {routed.name: routed.router for routed in routed_in(model)}
    for block_name, block in model.named_modules():
        children = dict(block.named_children())
        for child_name, experts in children.items():
            name = f"{block_name}.{child_name}"
            if name in known:
                yield name, known[name]
            elif is_experts(experts):
                yield from ((name, module) for module in children.values() if module is not experts)


def _is_choice(result: Any) -> bool:
    """Tell whether a module returned logits (or probabilities), scores and experts, each a matrix."""
    if not (isinstance(result, tuple) and len(result) == 3):
        return False
    if not all(torch.is_tensor(part) and part.ndim == 2 for part in result):
        return False
    return result[1].shape == result[2].shape and not result[2].is_floating_point()
