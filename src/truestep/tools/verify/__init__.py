"""Proves the numbers of a user's configuration: one step under many layouts, each against a float64 reference.

case, reduced     the user's model and rollouts, made small
layouts           the layouts that are run; worker: the real training loop on the ranks of one
oracle            advantages, losses, metrics, schedule and updates in float64; reference: the model in float64
custom            a user's own loss, as the oracle takes it
compare, updates  how far a layout's numbers are from the reference's; difference: how far they may be
blame             what is wrong with an update
judge, report     the verdicts, as a table, JSON and a figure
"""
