"""The plan of a step, made before any computation.

plan              the documents of a step, by rank and micro-batch
trees             groups of sequences with a shared prefix, which a plan keeps together
queue             makes plans from a source's documents
ahead             makes the next plan during a step
agreement         digests of a plan, which the ranks compare
"""
