"""New weights on their way from a trainer to the GPUs of servers, as vLLM's backend `nccl` takes them.

packed  how tensors lie in messages      link  what a trainer sends      nccl  by which way
"""
