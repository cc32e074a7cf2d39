"""The input embedding's gradient: accumulated in float32, for every token (the padding token's too).

Dimensions: H hidden.
"""

import copy
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from truestep.model.fast.gather_rows import repeat
from truestep.ranks.exchange import transfer

_AT_A_TIME = 4096  # tokens


class Rows(Protocol):
    """The owner of gradient buffers."""

    def add_rows(self, parameter: torch.nn.Parameter, rows: torch.Tensor, gradients: torch.Tensor) -> None: ...


def every_token_counts(model: Any) -> None:
    """Give the padding token's row a gradient too. transformers skips it even inside a document, where it may end a
    turn. Here padding is outside of documents and affects no label."""
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None


def accumulate_in_float32(model: Any) -> None:
    """Look up each distinct token once, so that its gradient is summed in float32 and rounded once. For CPUs, where
    torch sums in half precision, and a frequent token loses most of its gradient."""
    embedding = model.get_input_embeddings()
    look_up = embedding.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return look_up(input_ids)
        different, which = input_ids.flatten().unique(return_inverse=True)
        return repeat(look_up(different), which, 0).view(*input_ids.shape, -1)

    embedding.forward = forward


def add_rows(model: Any, keeper: Rows, kept: Iterable[torch.nn.Parameter]) -> bool:
    """Make the embedding add each token's gradient to a row of its float32 buffer, if `kept` has the weight. This
    avoids a gradient of the whole vocabulary in half precision. Tell whether this embedding is supported."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or embedding.weight not in set(kept):
        return False
    if "forward" in vars(embedding) or embedding.max_norm is not None or embedding.scale_grad_by_freq:
        return False
    look_up, known = embedding.forward, weakref.ref(keeper)
    make = None if type(embedding) is torch.nn.Embedding else _maker(embedding)
    if make is not None and not _same_rows(embedding, make):
        return False

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return look_up(input_ids)
        weight: Any = embedding.weight

        def add(gradient: torch.Tensor) -> None:
            owner = known()
            assert owner is not None, "the weights of this model are gone"
            owner.add_rows(weight, input_ids.flatten(), gradient.flatten(0, -2))

        rows = transfer(weight, partial(torch.nn.functional.embedding, input_ids), add)
        return rows if make is None else make(rows)

    replaced: Any = embedding
    replaced.forward = forward
    return True


def _maker(embedding: torch.nn.Embedding) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that applies an embedding subclass's own code, such as scaling, to rows already looked up. The
    rows [..., H] become the subclass's table, and it looks up all of them in order."""
    bare: Any = copy.copy(embedding)
    bare._parameters, bare.padding_idx = {}, None

    def make(rows: torch.Tensor) -> torch.Tensor:
        places = torch.arange(rows.shape[:-1].numel(), device=rows.device).view(rows.shape[:-1])
        bare.weight = rows.flatten(0, -2)
        try:
            made: torch.Tensor = bare.forward(places)
        finally:
            bare.weight = None
        return made

    return make


@torch.no_grad()
def _same_rows(embedding: torch.nn.Embedding, make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Tell whether an embedding's output depends only on the row looked up. Tries every token, at another index than
    its own."""
    tokens = torch.arange(embedding.num_embeddings, device=embedding.weight.device).flip(0)[None]
    try:
        return all(torch.equal(make(embedding.weight[ids]), embedding(ids)) for ids in tokens.split(_AT_A_TIME, 1))
    except Exception:  # the module's code needs more than a weight
        return False
