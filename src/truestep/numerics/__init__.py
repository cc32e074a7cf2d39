"""Batch-invariant ("exact") arithmetic: the bits of a row's result depend on that row alone, not on the batch.

A policy that samples and trains with it gets bitwise equal log-probs, whatever else is in a batch. Products, sums and
attention each have a fixed order of additions that depends only on the sizes of a row.

arithmetic        products, sums and log-sum-exps, on whichever of the two implementations runs on the device
kernels           Triton kernels with a fixed order of additions
plain             plain torch, where Triton does not run
attention         attention over pages of the KV cache
attend_kernels    the same as a Triton kernel
queries           describes the tokens of a pass and the pages of their sequences
operations        replaces the torch operations of a model by exact ones, or refuses them
compiling         does the same in torch.compile
"""
