"""A run, from its configuration to its end.

train             builds a trainer, restores its last checkpoint, and runs its loop
trainer           the loop over steps
assemble          makes the parts of a run from its options
elastic           generations of a run whose ranks come and go
checkpoint        checkpoints, each complete or absent
directory         the run's files: metrics, ledger, evaluations, rejected records
callbacks         the user's own code, called on events of a run
notes             messages before the first step and after the last
terminal          the display of a run on a terminal
"""
