"""Layers that mix tokens.

attention         causal attention over packed documents by torch's kernels; chooses the implementation
flash             attention over packed documents by FlashAttention 4
paths             shared prefixes: the keys that segments with ancestors see (paths_kernel: sums over copies)
context_parallel  context parallelism: a micro-batch's tokens divided over ranks
recurrence        layers that keep a state: the interface, and how operations get into a model's code
registered        the operations that truestep brings, by the names of functions
convolution       short causal convolutions
delta_rule        the gated delta rule, with a decay for each head (Qwen) or each channel (KDA)
state_space       Mamba-2 and Mamba-1
chunks            packed documents as chunks of equal length
"""

from truestep.model.mixers.recurrence import Call, LayerState, Recurrence, register

__all__ = ["Call", "LayerState", "Recurrence", "register"]
