"""The input embedding's gradient: every token counts, and counts in float32.

Dimensions: S tokens, U different tokens among them, H hidden.
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
    """What keeps the gradients."""

    def add_rows(self, parameter: torch.nn.Parameter, rows: torch.Tensor, gradients: torch.Tensor) -> None: ...


def every_token_counts(model: Any) -> None:
    """Give every token's row a gradient. transformers spares the padding token's, even inside a document (as the end of
    a turn); here padding is outside documents and reaches no label."""
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None


def accumulate_in_float32(model: Any) -> None:
    """Look up each different token once, so that its gradient is added up in float32 and rounded once. A CPU adds in
    half precision, where a token that a micro-batch repeats loses most of its gradient; a GPU does not."""
    embedding = model.get_input_embeddings()
    look_up = embedding.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return look_up(input_ids)
        different, which = input_ids.flatten().unique(return_inverse=True)
        return repeat(look_up(different), which, 0).view(*input_ids.shape, -1)

    embedding.forward = forward


def add_rows(model: Any, keeper: Rows, kept: Iterable[torch.nn.Parameter]) -> bool:
    """Have each token add its gradient to its row of the float32 buffer, if the keeper has one: the gradient of the
    whole vocabulary is not made, rounded and added. Tell whether it does."""
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
    """Give what a kind of embedding makes of the rows that it looks up, such as a multiple: its own code, to which rows
    [..., H] are a table that is read from top to bottom."""
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
    """Tell whether an embedding looks at nothing but rows: every token is tried, at another place than its own."""
    tokens = torch.arange(embedding.num_embeddings, device=embedding.weight.device).flip(0)[None]
    try:
        return all(torch.equal(make(embedding.weight[ids]), embedding(ids)) for ids in tokens.split(_AT_A_TIME, 1))
    except Exception:  # whatever its code needs beside a weight
        return False
