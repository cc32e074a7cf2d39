"""Metrics, whose types carry their reduction, and the sinks that they are logged to."""
