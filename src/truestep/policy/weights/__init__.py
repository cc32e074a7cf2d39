"""The weights of a rank, in float32, with their gradients.

protocol          what all of them offer: to the optimizer, checkpoints, samplers, publication
whole             all weights on every rank; sharded: spread over ranks by FSDP2
unread            weights of a checkpoint that are not read yet: renamed and cut first, then read once
keepers           the gradient buffer of a weight whose gradient autograd does not see
offloaded, host   weights in host memory, pinned where there is a GPU
finite            checks that weights and states are finite
"""
