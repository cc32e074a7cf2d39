"""What a person at a terminal sees while a command works: what it does, how far it has come, a run's numbers."""
