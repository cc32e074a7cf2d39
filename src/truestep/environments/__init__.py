"""Prompts, rewards, and tasks with checkable answers.

prompts           prompts of a JSONL file or a Hugging Face dataset, tokenised once
rewards           loading and calling a reward function, with checks of its signature and result
rater             the reward service: a pool of worker processes that rate completions
process           the run's handle of a worker process
supervisor        the worker's parent process: enforces limits and kills all processes below it (imports no torch)
worker            the process that imports and calls the user's reward (imports no torch)
same_process      a reward in the trainer's own process
isolation         Linux namespaces for supervisor and worker
memory            the memory that a group of processes uses
descendants       finding and killing a process's descendants
frames            the messages between run and worker: JSON, which cannot carry code
episodes          environments with several turns, and conversations as exact tokens
adapters          environments of other packages, by name
relay             passes messages between the run and the worker
forked            set-up of a forked process: seeds, signals, limits
limits            the limits that a supervisor enforces
printed           the log of the output that rewards print
sorting           the demo's task
"""
