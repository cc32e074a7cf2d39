"""Rollout files too large for memory, converted once to memory-mapped Arrow tables that all ranks of a host share.

documents    the checked documents of all tables, read on demand
cache        the directory of tables: locking, validation, conversion
convert      worker processes that convert parts of a file
layout       the Arrow columns of a document, and the writer and reader of a part
lines        fast parsing of JSON lines with lists of numbers
"""
