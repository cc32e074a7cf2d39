"""Slow, plain float64 statements of what SPEC.md says, written without looking at the trainer."""
