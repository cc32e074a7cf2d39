"""Batch-invariant ("exact") arithmetic: the bits of a row's result depend only on that row, not on the batch.

Sampling and training with it give bitwise equal log-probs, whatever else is in a batch. Products, sums and attention
add in a fixed order that depends only on the size of a row.

arithmetic        products, sums and log-sum-exps; chooses between the next two
kernels           Triton kernels with a fixed order of additions
plain             the same in plain torch, for devices without Triton
attention         attention over pages of the KV cache
attend_kernels    the same as a Triton kernel
queries           describes the tokens of a pass and the pages of their sequences
operations        replaces the torch operations of a model by exact ones, or refuses them
compiling         does the same in torch.compile
"""
