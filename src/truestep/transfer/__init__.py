"""New weights from a trainer to a server: through memory that both see, or from GPU to GPU.

Servers install it without the trainer's needs: it imports torch and numpy alone, and vLLM where that calls it.

checksum  of a tensor's bytes                  memory    what a trainer writes       source  how it is read
receiver  what a server reads and checks       vllm_plugin, vllm_engine  how a vLLM comes to it
packed    how tensors lie in messages          link      what a trainer sends       nccl    by which way
"""
