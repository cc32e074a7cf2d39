"""State of this process.

progress          what it does and what it waits for; the watch and the terminal read it
randomness        the random state that users' losses and optimizers may draw from
garbage           long-lived objects are moved out of the garbage collector's sight
"""
