"""The head: log-probs from hidden states, and the backward pass. It does not depend on the loss, and losses never get
logits.

chunked             the loop over chunks of rows: product, statistics, loss, gradient, two backward products
logits              the arithmetic of one chunk in plain torch
kernels             the same, with fused Triton kernels between the products
passes              the choice between plain torch, these kernels and the Hopper product
hopper_product      matrix product with a fused softmax for Hopper, which never stores logits (Gluon)
numerators          the output of that product
numerator_kernels   Triton kernels that work on this output
numerator_passes    forward and backward pass of a chunk with that product
check_product       compares that product with torch on this machine before it is used
vocab_parallel      the head with its weight sharded over the vocabulary
exact               log-probs that depend only on their own row, bit for bit
"""
