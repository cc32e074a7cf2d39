"""A Hugging Face model as a policy: loading, attention over packed documents, float32 weights, saving.

policy            hidden states of packed documents, and the head's weight and settings
loading           a Hugging Face directory becomes a policy; a probe refuses code that packing would break
model             what replaces parts of the model's own code, and the list of every patch
cuts              which rank has which layers and which part of each weight
weights           float32 weights and gradients: whole, sharded (FSDP2), or not read yet
exact             hidden states that do not depend on what else is in the batch
tensor_parts      the boxes of tensors that ranks write and read; tensor_files, tensor_stream: their files
save              a Hugging Face directory with the trained weights; adapter_files: adapters as peft has them
"""
