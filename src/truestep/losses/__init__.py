"""Losses: pure functions from per-label vectors to coefficients and sums. They never see a logit or a config."""
