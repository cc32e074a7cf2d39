"""The sizes of a model's attention heads, from its configuration."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadSizes:
    """The number and size of heads. Example: Qwen3-0.6B has 16 query heads and 8 key heads of size 128."""

    queries: int  # query heads
    keys: int  # key heads; there are as many value heads
    size: int  # the dimension of one head

    @staticmethod
    def of(config: Any) -> "HeadSizes":
        """Read the sizes from a configuration. Without `head_dim`, a head's size is hidden size / query heads."""
        text = config.get_text_config()
        queries = int(text.num_attention_heads)
        keys = getattr(text, "num_key_value_heads", None) or queries
        return HeadSizes(queries, keys, getattr(text, "head_dim", None) or text.hidden_size // queries)

    @property
    def width(self) -> int:
        """The dimension of a token's queries, summed over all heads."""
        return self.queries * self.size


def attending_layers(config: Any) -> int:
    """Count the layers that attend, from a configuration. Without kinds of layers in it, all do; others are recurrent
    or have no mixing of tokens."""
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            return sum(kind == "hybrid" or ("attention" in kind and "linear" not in kind) for kind in kinds)
    return count
