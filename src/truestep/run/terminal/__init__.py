"""What a person at a terminal sees while a command works.

run               a run's bar and numbers; in a file, a line a step
display           the lines at the bottom, drawn by one thread that the run never waits for
words             amounts and durations in few words
"""
