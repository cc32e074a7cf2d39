"""One optimizer step: the plan of its documents, the passes that compute it, the optimizer that applies it.

plan, queue       which documents make a step, on which rank, in which micro-batch; ahead: made a step early
schedule, passes  the order of forward and backward passes (1F1B for pipelines), as data, and the loop that runs it
runner            the gradient and the metrics of a plan
label_shares      the labels of a micro-batch, divided over the ranks that share its tokens
scoring, exact    what is computed before the first update: old and reference log-probs, exact log-probs
check, agreement  a sampler's log-probs and draws compared with the policy's; causes: why they differ
chosen            the labels of Clip-Cov and KL-Cov; groups: metrics of groups; machine: memory and speed of the GPU
beside            metrics on a side CUDA stream
next_tokens       distributions of the next token, for probes of servers
clipping          the norm of the gradient, and clipping by it
blame             which documents, or weights, make a gradient that is not finite
optimizer         the optimizer, its state in checkpoints, the learning rate; optimizers: the built-in ones
held_out          the loss of held-out documents

While a GPU computes, the host packs the next micro-batch. Within a step's passes it waits for one number only: how many
rows of a chunk of the head have a gradient. After them it waits for the gradient's norm, then launches the update.
"""
