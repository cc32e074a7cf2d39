"""A Hugging Face model as a policy.

policy            hidden states of packed documents, and the head's weight and settings
loading           a Hugging Face directory becomes a policy; a probe refuses code that packing would break
mixers            attention over packed documents
fast              faster forms of a model's own layers, and the list of every patch
cuts              which rank has which layers and which part of each weight
adapter           LoRA layers; adapter_files: adapters as peft has them; freezing: weights that are not trained
exact             hidden states that do not depend on what else is in the batch
heads             the sizes of attention's heads; no_dropout: a model draws nothing
save              a Hugging Face directory with the trained weights; tensor_stream: its tensors, one after another
"""
