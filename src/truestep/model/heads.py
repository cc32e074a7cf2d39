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
        """Read the sizes from a configuration: those of the widest layer."""
        return max(HeadSizes.of_layers(config), key=lambda sizes: sizes.width)

    @staticmethod
    def of_layers(config: Any) -> "list[HeadSizes]":
        """Read the sizes of each layer; Gemma 4's global layers have larger heads than its local layers."""
        text = config.get_text_config()
        if getattr(text, "is_heterogeneous", False):
            return [_sizes(layer) for layer in text.per_layer_config]
        return [_sizes(text)] * int(text.num_hidden_layers)

    @property
    def width(self) -> int:
        """The dimension of a token's queries, summed over all heads."""
        return self.queries * self.size


def _sizes(config: Any) -> HeadSizes:
    """Read one layer's sizes. Without `head_dim`, a head's size is hidden size / query heads."""
    queries = int(getattr(config, "num_attention_heads", None) or 0)
    if not queries:
        return HeadSizes(0, 0, 0)  # no layer attends
    keys = getattr(config, "num_key_value_heads", None) or queries
    return HeadSizes(queries, keys, getattr(config, "head_dim", None) or config.hidden_size // queries)


def attending_layers(config: Any) -> int:
    """Count the attention layers from a configuration's list of layer types; the others are recurrent or do not mix
    tokens. Without such a list, all layers count."""
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    for name in ("layer_types", "layers_block_type"):
        kinds = getattr(text, name, None)
        if isinstance(kinds, list | tuple) and len(kinds) == count:
            return sum(kind == "hybrid" or ("attention" in kind and "linear" not in kind) for kind in kinds)
    return count
