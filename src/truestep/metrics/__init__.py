"""Metrics, whose types say how they are reduced, and the sinks that they are logged to."""
