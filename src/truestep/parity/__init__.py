"""How far the sampler's log-probs are from the trainer's, and why: each cause measured by switching only it."""
