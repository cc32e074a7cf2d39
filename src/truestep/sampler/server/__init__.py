"""Rollouts from vLLM servers: requests, weight sync, and the checks that keep a bad or stale token out of a step.

client    one server over HTTP           answer    what must hold before an answer may become documents
check     what a server says of itself    probe     fixed prompts that both sides score
sync      new weights into a server       fleet     all servers: load, versions, loss and recovery
groups    whole groups with rewards       source    the trainer's side
"""
