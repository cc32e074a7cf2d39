"""A whole RL run on this machine, without a GPU or a download."""
