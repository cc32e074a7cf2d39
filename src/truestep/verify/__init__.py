"""Proves the numbers of a user's configuration: one step under many layouts, each against a float64 reference."""
