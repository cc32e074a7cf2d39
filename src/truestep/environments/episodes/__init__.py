"""Environments of several turns: what a user writes, the processes that run it, and conversations token for token.

environment       what a user writes: `Environment`, its tools, and what passes between it and the policy
tool_calls        tool calls in a completion's text, by model family
conversation      a conversation's tokens: drawn ones as they were drawn, others as the chat template's difference
service           the run's side of the processes that run environments
worker            the process that imports an environment and forks one process for each episode (imports no torch)
play              plays an episode: turns of the policy and of its environment, until a document is made
"""
