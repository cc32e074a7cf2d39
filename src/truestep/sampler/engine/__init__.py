"""Sampling with the weights in hand: continuous batching over a paged cache of keys and values."""
