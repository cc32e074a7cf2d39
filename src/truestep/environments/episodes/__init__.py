"""Environments of several turns: what a user writes, the processes that run it, and conversations token for token.

environment       what a user writes: `Environment`, its tools, and what passes between it and the policy
tool_calls        tool calls in a completion's text, by model family
conversation      a conversation's tokens: drawn ones as they were drawn, others as the chat template's difference
service           the run's side: begins, steps and ends episodes, in several processes
host              a thread that serves the episodes of one process
connection        that process as the run sees it
worker            the process that imports an environment and forks one process for each episode (imports no torch)
instance          the process of one episode (imports no torch)
loading           loading the user's class or object (imports no torch)
same_process      episodes in the trainer's own process
program           the environment of an episode that is a program
answers           the checks of what an environment's methods return
made_rows         records of prompts that an environment makes itself
wire              what the frames between run and processes hold
"""
