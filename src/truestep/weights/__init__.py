"""The weights of a rank, in float32, with their gradients.

protocol          the interface used by optimizer, checkpoints, samplers and publication
whole             weights that are not sharded; sharded: weights sharded over ranks by FSDP2
lazy              unread weights of a checkpoint: renamed and cut first, then read once
gradient_buffers  a table of float32 gradient buffers by number; sum_kernel: adds partial gradients to a buffer
offloaded         frozen weights in host memory
pieces            the part of each weight that a rank has; blocks: blocks of a row that share a scale
layers            finds a model's decoder layers, and counts active weights
remote_parts      parts of a checkpoint that are in the memory of other machines
tensor_parts      writes and reads a checkpoint's tensors in parts, for any layout of ranks
finite            checks that weights and states are finite
errors            the error for models that cannot be trained
"""
