"""A whole RL run on this machine: no GPU, no download."""
