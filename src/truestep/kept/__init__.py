"""The rollouts that a run keeps for people to read: which ones, as rows, in files of the run's directory."""
