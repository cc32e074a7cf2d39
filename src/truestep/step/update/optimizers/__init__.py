"""The built-in optimizers, each an update rule for single weights.

by_weight         a torch optimizer that applies a rule to each weight
adamw             AdamW
adamw_kernel      AdamW over many weights in one Triton kernel
eight_bits        AdamW with 8-bit moments
eight_bits_kernel the same in one Triton kernel
muon              Muon: orthogonalised momentum
exchange          gathers sharded matrices, and scatters results
conveyor          copies offloaded state between host and GPU, overlapped with the passes
"""
