"""A Hugging Face model as a policy.

policy            computes hidden states of packed documents; holds the head's weight and settings
loading           loads a Hugging Face directory as a policy; probes refuse models that packing would break
mixers            attention over packed documents, and layers that keep a state
fast              faster versions of a model's own layers, and the list of every patch
experts           experts as one computation; routers' terms, loads and biases
cuts              pipeline stages and tensor parallelism: the layers and weight slices of each rank
adapter           LoRA layers; adapter_files: adapters in peft's format; freezing: freezes weights by name
exact             hidden states that do not depend on the rest of the batch
handed            hands layers what a model's own code drops on its way
heads             the number and size of attention heads; no_dropout: turns dropout off
towers            the text model in a directory with towers for images or sound
save              writes a Hugging Face directory with the trained weights; tensor_stream: its tensors, layer by layer
"""
