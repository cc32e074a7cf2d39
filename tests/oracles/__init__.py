"""Slow, plain float64 statements of what docs/contract.md says, written without looking at the trainer."""
