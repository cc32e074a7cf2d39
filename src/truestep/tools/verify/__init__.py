"""Verifies a user's configuration: computes some steps under many layouts, and compares each with a float64 reference.

case              the model, documents and options that all layouts compute
reduced           a small model of the user's architecture, and documents to match
layouts           the layouts: micro-batches, packing, chunks, ranks
judge             runs the layouts and judges them
worker            the training loop on a layout's ranks, with a recorder of each step
reference         the model in float64
oracle            advantages, losses, metrics, schedule and updates in float64
custom            a user's own loss for the oracle
compare           compares loss, metrics, gradients and log-probs with the reference
updates           compares the optimizer's updates with the oracle
blame             finds what is wrong with an update
difference        a measured difference and its bound
report            the verdicts as a table, JSON and a figure
"""
