"""Sampling in process: continuous batching over a paged KV cache.

engine            the loop of engine steps: prefill, decode, draw
schedule          decides on the host what each step computes: admission, chunked prefill, preemption, pages
cache             the paged KV cache
rows              the arguments of each decoded row, packed for one copy to the device
forward           the model's forward pass over the paged KV cache
attend            attention over the paged KV cache, in plain torch
draw              draws of tokens from logits, seeded for each completion
stops             stop texts
serving           checks each kernel against plain torch before it is used
graphs            CUDA graphs of prefill and decode
device            settings and functions for CPU or GPU
team              tensor ranks that sample together
exact             steps whose log-probs equal training's bit by bit
attend_kernels, copy_kernels, draw_kernels    Triton kernels for attend, device and draw
"""
