"""Measures the gap between the sampler's and the trainer's log-probs, and finds its cause by changing one setting at a
time.

gap               the gap over a set of rollouts, and its most likely cause
causes            possible causes: temperature, top-p, shifted ids, dtype, RoPE settings, stale weights and others
sample            rollouts of the configured sampler
scores            the trainer's log-probs, as configured and with one setting changed
report            the results as a table, parity.json and parity.svg
"""
