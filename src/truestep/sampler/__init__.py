"""Samplers, which write rollouts: from the policy itself or from servers. Evaluation, which samples too.

decode            sampling with the policy, by the engine or by transformers' own attention and cache
engine            continuous batching over a paged KV cache
in_process        a source of documents that the policy samples
rated             completions rated as they end; groups: completions become documents
server            a source of documents that inference servers sample
evaluate          held-out prompts, answered greedily and by sampling
team              tensor ranks that sample together
"""
