"""State of this process.

progress          counts of work done, names of current work, and what it waits for; for the watch and the terminal
randomness        the global random state, from which users' losses and optimizers may draw
garbage           freezes long-lived objects, so that garbage collections are short
"""
