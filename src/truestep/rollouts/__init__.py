"""Rollout records: their files and streams, their checks, the advantages of a group, and packing."""
