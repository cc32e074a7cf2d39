"""New weights from a trainer to a server: through memory that both see, or from GPU to GPU.

Servers install it without the trainer's needs: it imports torch and numpy only, and vLLM where that calls it.

memory            what a trainer writes for servers of its machine; source, receiver: how it is read and checked
vllm_plugin       vLLM's entry point to that; vllm_engine: its workers' side
link, packed      tensors sent to a server's GPUs, in chunks; nccl: the wire
checksum          a fast checksum of a tensor's bytes
"""
