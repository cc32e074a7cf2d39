"""Layers that mix tokens.

attention         causal attention over packed documents by torch's kernels; chooses the implementation
flash             attention over packed documents by FlashAttention 4
paths             shared prefixes: the keys of segments with ancestors (paths_kernel: sums gradients over copies)
context_parallel  context parallelism: a micro-batch's tokens divided over ranks
recurrence        recurrent layers: the interface, and how our operations replace those in a model's code
registered        truestep's own operations, by the names of the functions that they replace
convolution       short causal convolutions
delta_rule        the gated delta rule, with a decay for each head (Qwen) or each channel (KDA)
state_space       Mamba-2 and Mamba-1
chunks            packed documents as chunks of equal length
"""

from truestep.model.mixers.recurrence import Call, LayerState, Recurrence, register

__all__ = ["Call", "LayerState", "Recurrence", "register"]
