"""Measures how far the sampler's log-probs are from the trainer's, and each cause of it by switching only that."""
