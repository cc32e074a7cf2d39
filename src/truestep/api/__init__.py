"""The commands as functions, for Python programs. `truestep` itself has their names (docs/python.md)."""
