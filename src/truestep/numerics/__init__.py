"""Arithmetic whose result for a row depends on that row alone: never on how many rows there are, or on what they hold.

A policy that samples and trains with it gives the same log-probs to the last bit, whatever shares its batch. Products,
sums and attention have one order of additions each, which the sizes of a row decide.

arithmetic        products, sums, log-sum-exps: by Triton kernels of one tile shape (kernels) or plain torch (plain)
attention         over pages of keys (attend_kernels); queries: which tokens and keys a pass has
operations        a model's own code, operation by operation: each has an exact form or is refused
compiling         the same in code that torch compiles
"""
