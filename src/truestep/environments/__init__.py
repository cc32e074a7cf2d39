"""Prompts and rewards, and tasks whose answers can be checked.

prompts           prompts of a JSONL file or a Hugging Face dataset, tokenised once
rewards           a reward function by import path: its signature and its result are checked
rater             the reward service: many processes that rate completions, and what becomes of those that fail
process           one of them as the run sees it
keeper            its parent: holds it to its limits and kills all below it; isolation: Linux namespaces for both
worker            the process that imports and calls the user's function; it and the keeper import no torch
frames            the messages between run and worker, which cannot carry code
sorting           the demo's task
"""
