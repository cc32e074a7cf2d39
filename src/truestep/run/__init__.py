"""A run, from its configuration to its end.

train             makes a trainer, puts it where its last checkpoint left it, and starts its loop
trainer           the loop over steps
assemble          options become parts
checkpoint        checkpoints, each complete or absent
directory         the run's files: metrics, ledger, evaluations, rejected records
callbacks         a user's own code that is told how a run goes
notes             what a run prints before its first step and after its last
terminal          what a person at a terminal sees
"""
