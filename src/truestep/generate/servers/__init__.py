"""Inference servers: documents, answers to held-out prompts, and new weights.

protocol          what the trainer needs of a server; vllm, sglang: servers of these kinds; http: JSON and events
servers           the event loop in which one process talks to all servers; shared: the same for all ranks
source            a source of documents that the servers complete
look_ahead        groups completed ahead of the trainer; group_maker: whole groups with rewards
fleet             which server gets the next request, its load, its weights, its recovery
check             what a server says of itself, before the first weights; probe: fixed prompts that both sides score
check_answer      what must hold before an answer may become documents; errors: what is done about a failure
weight_files      new weights in a directory that servers read
host_copies       new weights in host memory, from which nccl_link sends them to servers' GPUs
evaluation        answers to held-out prompts
"""
