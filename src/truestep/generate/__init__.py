"""Sampling of rollouts, in process or from inference servers, and evaluation on held-out prompts.

generator         the interface: requests, completions, and what completes them
engine            a generator in process: continuous batching over a paged KV cache
servers           a generator of inference servers: requests, and publication of weights
openai            completions and answers of any OpenAI-compatible URL, for judges and teachers
play              plays an episode to its end; with a reward function an episode has one turn
environment       episodes of several turns: the policy and its environment take turns
command           episodes that request completions from the endpoint: programs, and environments that call the policy
endpoint          an HTTP server for OpenAI's clients; an API key names a document
parts             the parts of the work that asks for completions
group_maker       plays a group's episodes, for all samplers
groups            rules for groups that all samplers share
order             which prompt each group gets: a mixture of sources, without resting prompts
pools             the prompts of one source: its passes, and which of them rest
in_process        a source whose documents are sampled in process
evaluate          evaluation on held-out prompts, greedy and sampled
sticky            remembers which rank or server has a conversation's past in its cache
read              the text of completions, and the tokens that end them
hosts             names of this machine
errors            errors of servers, by how they are handled
"""
