"""The sizes of a model's attention heads, from its configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadSizes:
    """Example: Qwen3-0.6B has 16 heads of queries and 8 of keys, of 128 numbers each."""

    queries: int
    keys: int  # and as many of values
    size: int  # numbers of a head

    @staticmethod
    def of(config: Any) -> "HeadSizes":
        """Read them; a model without a `head_dim` divides its hidden size among its heads."""
        text = config.get_text_config()
        queries = int(text.num_attention_heads)
        keys = getattr(text, "num_key_value_heads", None) or queries
        return HeadSizes(queries, keys, getattr(text, "head_dim", None) or text.hidden_size // queries)

    @property
    def width(self) -> int:
        """The numbers of a token's queries, over all heads."""
        return self.queries * self.size
