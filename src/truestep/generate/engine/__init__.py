"""Sampling in process: continuous batching over a paged KV cache.

service           takes requests at any time from tasks, threads and other ranks; alternates sampling with their work
dispatch, rounds  which rank samples which request, and how ranks exchange requests
phase             a rank's phase of sampling: opens a session when requests are there
engine            the loop of engine steps: prefill, decode, draw
plain             static batches with transformers' own cache, for models that the engine does not serve
schedule          decides on the host what each step computes: admission, chunked prefill, preemption
steps             the data of the plan: completions, prompts, the work of a step
pages             the cache's pages, and which tokens they hold
states            the slots of recurrent layers' states
cache             the memory of the paged KV cache and of states
rows              the arguments of each decoded row, packed for one copy to the device
forward           the model's forward pass over the paged KV cache
attend            attention over the paged KV cache, in plain torch
recur             recurrent operations over states by slot
draw              draws of tokens from logits, seeded for each completion
stops             stop texts
serving           checks each kernel against plain torch before it is used
graphs            CUDA graphs of prefill and decode
device            settings and functions for CPU or GPU
team              tensor ranks that sample together
exact             steps whose log-probs equal training's bit by bit
attend_kernels, copy_kernels, draw_kernels, recur_kernels    Triton kernels for attend, device, draw and recur
"""
