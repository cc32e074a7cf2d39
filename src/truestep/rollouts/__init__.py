"""Rollout records: reading them, checking them, and turning the rewards of a group into advantages."""
