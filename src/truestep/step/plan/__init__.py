"""The plan of a step, made before any computation.

plan              the documents of a step, by rank and micro-batch
trees             sequences that a plan keeps together because they share a prefix
queue             one plan after another from a source
ahead             the next plan, made during a step, and agreed on by all ranks
"""
