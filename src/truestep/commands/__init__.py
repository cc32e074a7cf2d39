"""The commands, for the shell and for Python. `truestep` itself has the functions' names (docs/python.md).

cli               the shell's commands
running           `train`, and its result
looking           `score`, `verify`, `parity`, `plan`, `export` and a look at rollout files
"""
