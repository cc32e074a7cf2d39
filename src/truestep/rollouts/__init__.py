"""Rollout records: their files and streams, their checks, the advantages of a group, and packing. Knows no model.

record, values    a record and its checks: what is wrong becomes one sentence
files, parquet    JSONL and Parquet files; table: large files as memory-mapped tables; parts: files of each data rank
check             `truestep data check`; rejects: rejected.jsonl
source            where documents come from, as the trainer sees it; shared: one rank reads for all
advantages        a baseline and a scale, by group and by step
selection         what a step leaves out: zero advantages, truncated documents
packing           documents become micro-batches of packed tokens with shifted labels
chat              messages become tokens and labels, by the model's chat template
stream            rollouts sent while the run goes on: Redis or a watched directory, whole groups, no id twice
"""
