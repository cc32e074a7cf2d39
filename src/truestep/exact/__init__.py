"""Arithmetic whose result for a row depends on that row alone: never on how many rows there are, or on what they hold.

A policy that samples and trains with it gives the same log-probs to the last bit, whatever shares a batch. Products,
sums and attention have one order of additions each, which the sizes of a row decide. On a GPU they are Triton kernels
of one tile shape (`kernels`, `attend_kernels`). Elsewhere they are single additions and multiplications of torch, each
of which is rounded correctly (`plain`).
"""
