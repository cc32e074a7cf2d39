"""Rollouts from inference servers: requests, new weights, and the checks that keep a bad or stale token out of a step.

protocol  what the trainer needs of a server      vllm      a server that speaks vLLM's language
check     what a server says of itself            answer    what must hold before an answer may become documents
probe     fixed prompts that both sides score     sync      new weights, in memory or on a disk that servers see
staging   waits for weights to be checked
fleet     all servers: load, versions, recovery   making    whole groups with rewards
ahead     groups made ahead of the trainer        source    the trainer's side
"""
