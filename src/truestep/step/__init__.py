"""One optimizer step.

plan              the documents of the step, by rank and micro-batch
before            annotations and checks of documents before the first update
compute           forward and backward passes, metrics
update            the optimizer
gpu_use           memory and speed of the GPU
next_tokens       distributions of the next token, for probes of servers
held_out          the loss of held-out documents

While a GPU computes, the host packs the next micro-batch. During a step's passes there is one kind of host-device sync:
the number of rows with a gradient, per chunk of the head. After the passes the host waits for the gradient's norm, then
launches the update.
"""
