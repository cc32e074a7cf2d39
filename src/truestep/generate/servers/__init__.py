"""Inference servers: completions, and publication of weights.

protocol          the interface of a server
http              HTTP, JSON and server-sent events
vllm, sglang      servers of these kinds
started, keeper   servers that the run starts
servers           the event loop in which the first rank talks to all servers
shared            access of all ranks to the servers
source            a source whose documents the servers sample
look_ahead        groups that are sampled ahead of the trainer, within max_staleness
batches           sends equal requests that are made at once as one
confirmed         work that is repeated if its completions are not confirmed
fleet             load balancing, publication of weights, recovery of lost servers
check             checks of a server when the run starts
probe             fixed prompts that trainer and server both score, to compare their weights
check_answer      checks of a server's answer before it becomes documents
weight_files      publication through a directory that the servers read
host_copies       copies of the weights in host memory, for publication by NCCL
nccl_link         sends weights from host memory to a server's GPUs
"""
