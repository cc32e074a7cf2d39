"""Sampling of rollouts, in process or from inference servers, and evaluation on held-out prompts.

decode            sampling with the policy's own weights, by the engine or by transformers' generation code
engine            continuous batching over a paged KV cache
in_process        a source whose documents the policy samples in process
completions       requests, sampling options and completions
rewarded          sampling with rewards: each completion is rated as soon as it ends
groups            from rated completions to a group's documents; rules that all samplers share
servers           inference servers: sampling, evaluation and publication of weights
evaluate          evaluation on held-out prompts, greedy and sampled
"""
