"""One optimizer step.

plan              the documents of the step, by rank and micro-batch
before            annotations and checks of documents before the first update
compute           forward and backward passes, metrics
update            the optimizer
gpu_use           memory and speed of the GPU
next_tokens       distributions of the next token, for probes of servers
held_out          the loss of held-out documents

While a GPU computes, the host packs the next micro-batch. Within a step's passes it waits for one number only: how many
rows of a chunk of the head have a gradient. After them it waits for the gradient's norm, then launches the update.
"""
