"""The commands, for the shell and for Python. The package `truestep` exports the functions (docs/python.md).

cli      the command line
running  `train` and its result, in Python
looking  the other commands in Python, such as `score`, `verify` and `export`
session  a training loop of your own in Python
tinker   the Tinker protocol
"""
