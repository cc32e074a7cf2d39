"""Layers that mix tokens.

attention         causal attention over packed documents; no token sees another document
flash             the same by FlashAttention 4
context_parallel  a micro-batch's tokens divided over ranks
"""
