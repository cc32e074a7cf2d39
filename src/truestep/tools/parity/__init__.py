"""Measures how far the sampler's log-probs are from the trainer's, and each cause of it by switching only that.

sample            rollouts of the configured sampler, as it is now
scores            log-probs as the trainer gives them, and with one thing switched
causes            temperature, top-p, shifted ids, dtype, RoPE settings, older weights and the others
gap, report       the gap and its cause; the table, parity.json and parity.svg
"""
