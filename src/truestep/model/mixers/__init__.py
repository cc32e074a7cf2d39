"""Layers that mix tokens.

attention         causal attention over packed documents by torch's kernels; chooses the implementation
flash             attention over packed documents by FlashAttention 4
handed            hands attention what a model's own code drops on its way
context_parallel  context parallelism: a micro-batch's tokens divided over ranks
"""
