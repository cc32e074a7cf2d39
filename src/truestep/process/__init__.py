"""State of this process.

progress          counts of work done, names of current work, and what it waits for; for the watch and the terminal
randomness        the global random state, from which users' losses and optimizers may draw
bytecode          keeps bytecode where Python would compile all sources at each start
garbage           freezes long-lived objects, so that garbage collections are short
"""
