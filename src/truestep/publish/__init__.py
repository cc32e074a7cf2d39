"""Publication of weights to the GPUs of servers by NCCL, in the protocol of vLLM's weight transfer backend `nccl`.

packed            packing of tensors into chunks
link              joins a group with a server, and sends chunks with a time limit
nccl              the NCCL group of the trainer and one server
"""
