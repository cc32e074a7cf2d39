"""The head: log-probabilities from hidden states, and gradients back. It knows no loss; no loss sees a logit.

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
exact               log-probs whose bits depend on their own row alone
"""
