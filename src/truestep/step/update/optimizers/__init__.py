"""The built-in optimizers, each a rule for one weight at a time.

by_weight         a torch optimizer that applies a rule to each weight
adamw, eight_bits AdamW, and AdamW with 8-bit moments, each with its Triton kernel
muon              orthogonalised momentum; exchange: gathers and scatters sharded matrices
conveyor          copies states between host and GPU, overlapped with the passes
"""
