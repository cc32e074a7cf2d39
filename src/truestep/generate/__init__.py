"""Sampling of rollouts, in process or from inference servers, and evaluation on held-out prompts.

generator         the interface: requests, completions, and who completes them
engine            a generator in process: continuous batching over a paged KV cache
servers           a generator of inference servers: requests, and publication of weights
openai            completions and answers of any OpenAI-compatible URL, for judges and teachers
play              plays an episode to its end; those of a reward function have one turn
environment       episodes of several turns: the policy and its environment in turn
command           episodes that ask at the endpoint: programs, and environments that drive the policy themselves
endpoint          an HTTP server for OpenAI's clients, whose keys name documents
parts             the parts of the work that asks for completions
group_maker       plays a group's episodes, for all samplers
groups            rules for groups that all samplers share
order             which prompt each group gets: a mixture of sources, without prompts that rest
pools             the prompts of one source: its passes, and which of them rest
in_process        a source whose documents are sampled in process
evaluate          evaluation on held-out prompts, greedy and sampled
sticky            the place that has a conversation's past
read              the text of completions, and the tokens that end them
hosts             names of this machine
errors            errors of servers, by what is done about them
"""
