"""The display of a command's progress on a terminal.

run               a run's progress bar and metrics; in a file, a line per step
display           the changing lines at the bottom of a terminal, drawn by one thread that the run never waits for
words             formats of progress, byte counts and durations
"""
