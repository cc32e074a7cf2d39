"""Who writes rollouts."""
