"""Samplers, which write rollouts: from the policy itself or from servers. Evaluation, which samples too.

decode            sampling with the policy, by the engine or by transformers' own attention and cache
engine            continuous batching over a paged KV cache
in_process        a source of documents that the policy samples
completions       what a sampler is asked for, and what it gives back
rewarded          completions rated as they end; groups: completions become documents
servers           inference servers: documents, answers, new weights
evaluate          held-out prompts, answered greedily and by sampling
"""
