"""Rollout records: reading, checks, advantages and packing. Independent of the model.

fields            the table of a document's fields
record, values    the checks of a record and its values; rows: fields with a row per token
documents         lossless conversion of a document to JSON and back
files, parquet    reading of JSONL and Parquet files; pages: limits on Parquet files, checked before decoding
stored            documents of large files in a memory-mapped file
check, rejects    `truestep data check`; the file rejected.jsonl
source            the interface of document sources, and the source of files
parts, shared     sources for several ranks: one part of the files per data rank; one rank that reads for all
stream            documents that are sent during the run
advantages        baselines and scales, by group and by step
selection         documents that a step leaves out: zero advantages, truncated documents
episodes          why an episode ended, and the time and tool calls of its turns, in a document's metadata
packing           converts documents to micro-batches of packed tokens with shifted labels
prefixes          the segments that sequences with the same first tokens share
chat, rendering   converts messages to tokens and labels by the model's chat template; limits on its time and memory
kept              samples of rollouts that a run keeps for people to read
"""
