"""Environments with several turns: the base class for users, the processes that run it, and conversations as tokens.

environment       the base class for users: `Environment`, its tools, and the values that it exchanges with the policy
tool_calls        tool calls in a completion's text, by model family
conversation      a conversation's tokens: the policy's as they were sampled, others as the chat template adds them
service           the run's side: begins, steps and ends episodes, in several processes
host              a thread that serves the episodes of one process
connection        the run's connection to that process
worker            the process that imports an environment and forks one process for each episode (imports no torch)
user_environment  calls the user's environment, in the process of one episode (imports no torch)
loading           loading the user's class or object (imports no torch)
same_process      episodes in the trainer's own process
program           the environment of an episode that is a program
script            a Python program that begins as a fork of a process that has imported its modules
answers           the checks of what an environment's methods return
made_rows         records of prompts that an environment makes itself
wire              the content of the frames between the run and these processes
"""
