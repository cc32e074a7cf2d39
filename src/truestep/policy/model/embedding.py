"""The input embedding's gradient: every token counts, and counts in float32.

Dimensions: S tokens, U different tokens among them, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from truestep.policy.model.repeat import repeat


def every_token_counts(model: Any) -> None:
    """transformers gives the padding token's row no gradient, also where the token stands in a document, as the end of
    a turn does. Here padding is no document and reaches no label, so no row needs to be spared."""
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None


def accumulate_in_float32(model: Any) -> None:
    """A CPU adds up a half-precision embedding's gradient in half precision, one token after another, and a token that
    a packed micro-batch repeats loses most of it. So each different token is looked up once, and its gradient is added
    up in float32 before its one rounding. (A GPU does so itself.)"""
    embedding = model.get_input_embeddings()
    look_up = embedding.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return look_up(input_ids)
        different, which = input_ids.flatten().unique(return_inverse=True)
        return repeat(look_up(different), which, 0).view(*input_ids.shape, -1)

    embedding.forward = forward
