"""The commands, for the shell and for Python. The package `truestep` exports the functions (docs/python.md).

cli               the command line
running           `train` and its result, in Python
looking           `score`, `verify`, `parity`, `audit`, `serve`, `plan` and `export`, in Python
"""
