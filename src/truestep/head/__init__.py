"""The head: log-probabilities from hidden states, and gradients back. It knows no loss; no loss sees a logit.

chunked           the loop over chunks of rows: product, statistics, loss, gradient, two products
logits            one chunk's arithmetic in plain torch
passes            which kernels compute it: plain torch, Triton (kernels), or the product below
product           Hopper: a matrix product that makes the softmax and stores no logits (Gluon)
numerators        its output; numerator_kernels, numerator_passes: the head made of it
check_product     compares that product with torch on this machine before it is used
vocab_parallel    the head over a weight whose rows are sharded
exact             log-probs of a row that depend on that row alone
"""
