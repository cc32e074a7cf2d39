"""The input embedding's gradient: every token counts, and counts in float32.

Dimensions: S tokens, U different tokens among them, H hidden.
"""

from typing import Any

import torch

from truestep.policy.model.repeat import repeat


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
