"""What a step is made of, before anything is computed.

plan              which documents make a step, on which rank, in which micro-batch
queue             one plan after another from a source
ahead             the next plan, made during a step, and agreed on by all ranks
"""
