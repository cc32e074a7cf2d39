"""Gives the tokens of two passes the same experts, so that the passes can be compared.

Two ways of computing a layer round differently. Where a router's scores nearly tie, rounding alone decides which
experts compute, and one other expert is an error far above those of rounding. So the routers' results are kept in one
pass, and given to the tokens of the other. What the routers of the other pass compute themselves is compared, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from truestep.model.experts.routers import routed_in

# The results of each layer's router for all tokens, by the name of the layer's experts: logits, scores and experts.
Routes = dict[str, tuple[torch.Tensor, ...]]


@contextmanager
def routes_kept(model: Any) -> Iterator[Routes]:
    """Keep the results of all routers within the block, of several passes one after the other."""
    routes: Routes = {}

    def keep(name: str, result: Any) -> None:
        if isinstance(result, tuple) and all(torch.is_tensor(part) and part.ndim == 2 for part in result):
            before = routes.get(name, tuple(part[:0] for part in result))
            routes[name] = tuple(map(torch.cat, zip(before, result, strict=True)))

    hooks = [
        routed.router.register_forward_hook(lambda _, __, result, name=routed.name: keep(name, result))
        for routed in routed_in(model)
    ]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def routes_given(model: Any, routes: Routes, part: int = 0) -> Iterator[list[torch.Tensor]]:
    """Let routers give these results within the block, which is one pass. If the tokens are divided over ranks, this
    rank has the tokens of part `part`. Tokens that come after all others, such as padding, get the routers' own
    results. Yields the logits that routers computed less those of `routes`, relative to these, [T] for each layer."""
    apart: list[torch.Tensor] = []

    def give(name: str, own: Any) -> Any:
        if name not in routes:
            return None
        count, total = len(own[0]), len(routes[name][0])
        start = 0 if count >= total else part * count
        given = tuple(each[start : start + count] for each in routes[name])
        right = given[0].float()
        apart.append((own[0][: len(right)].float() - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-12))
        return tuple(torch.cat([each, mine[len(each) :]]) for each, mine in zip(given, own, strict=True))

    hooks = [
        routed.router.register_forward_hook(lambda _, __, result, name=routed.name: give(name, result))
        for routed in routed_in(model)
    ]
    try:
        yield apart
    finally:
        for hook in hooks:
            hook.remove()
