"""The weights of a rank, in float32, with their gradients.

protocol          what all of them offer: to the optimizer, checkpoints, samplers, publication
whole             all weights on every rank; sharded: spread over ranks by FSDP2
lazy              weights of a checkpoint that are not read yet: renamed and cut first, then read once
gradient_buffers  the float32 buffer of a weight whose gradient autograd does not see; sum_kernel adds parts to it
offloaded         frozen weights in host memory
pieces, blocks    which rank has which part of each weight; rows that share a scale
layers            a model's decoder layers
tensor_parts      what each rank writes of a checkpoint, and how a part is read at any layout
finite            checks that weights and states are finite
errors            the error about a model that a user can mend
"""
