"""Sampling with the weights in hand: continuous batching over a paged KV cache.

engine            the loop of steps; schedule: what each step computes (host logic only; knows no model, no tensor)
cache             pages of keys and values; rows: what the device knows of each sequence in flight
forward           the model's own code over the paged cache; attend: its attention
draw              from logits to a token, by the completion's own seed
stops             stop texts, wherever tokens cut them
serving           which kernels serve on this machine: each is first compared with plain torch
graphs            CUDA graphs of steps
device            what differs between devices; team: tensor ranks that sample together
exact             steps whose log-probs are training's to the last bit
*_kernels         the Triton kernels of the modules beside them
"""
