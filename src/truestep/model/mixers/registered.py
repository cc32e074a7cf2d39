"""truestep's own operations of recurrent layers, by the names of the functions in transformers' models."""

from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.delta_rule import DeltaRule
from truestep.model.mixers.recurrence import Recurrence, put_in, register
from truestep.model.mixers.state_space import Mamba1, Mamba2

__all__ = ["put_in"]

# None: a fused kernel for training that replaces several functions. Models have no plain version of it, so it is
# switched off.
FUNCTIONS: dict[str, Recurrence | None] = {
    "causal_conv1d_fn": Convolution(),
    "torch_chunk_gated_delta_rule": DeltaRule(),
    "chunk_kimi_delta_attention": DeltaRule(),
    "mamba2_chunk_scan": Mamba2(),
    "mamba_selective_scan": Mamba1(),
    "mamba2_split_conv1d_scan_combined": None,
    "mamba_inner_fn": None,
}

for _name, _recurrence in FUNCTIONS.items():
    register(_name, _recurrence)
