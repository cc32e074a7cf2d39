"""The experts to which the engine's tokens were routed. Training replays them.

In a pass, each layer that routes writes its choices to a staging buffer. The buffer keeps its address, because CUDA
graphs write to it. After the pass, one copy moves the choices to the tokens' pages, where their keys and values are. So
a prompt that starts from pages of the cache has their routes too.

Dimensions: T tokens of a pass, L layers that route, k experts of a token in each.
"""

import numpy as np
import torch

from truestep.generate.engine.cache import PagedCache
from truestep.types import RouteShape


class RouteStage:
    def __init__(self, shape: RouteShape, place: torch.device):
        self._dtype = torch.uint8 if max(shape.experts) <= 2**8 else torch.int16
        self._each = len(shape.experts), shape.chosen
        self._staged = torch.zeros(0, *self._each, dtype=self._dtype, device=place)

    @property
    def address(self) -> int:
        return self._staged.data_ptr()

    def begin(self, tokens: int, cache: PagedCache) -> None:
        """Allocate room for passes of `tokens` tokens, and for the routes of the cache's tokens."""
        if len(self._staged) < tokens:
            self._staged = self._staged.new_zeros(tokens, *self._each)
        pages = cache.spare + 1
        cache.routes = self._staged.new_zeros(pages, cache.page_size, *self._each)

    def record(self, place: int, index: torch.Tensor) -> None:  # [T, k]
        self._staged[: len(index), place] = index

    def keep(self, cache: PagedCache, pages: torch.Tensor, offsets: torch.Tensor) -> None:  # [T], [T]
        """Move the routes of a pass to the pages of its tokens."""
        assert cache.routes is not None
        cache.routes[pages, offsets] = self._staged[: len(pages)]


def as_experts(routes: np.ndarray) -> np.ndarray:
    """Return routes as expert ids."""
    return routes if routes.dtype == np.uint8 else routes.view(np.uint16)
