"""The commands as functions, for Python programs. `truestep` itself has their names (docs/python.md).

running           `train`, and its result
looking           `score`, `verify`, `parity`, `plan`, `export` and a look at rollout files
"""
