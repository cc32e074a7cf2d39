"""The law, proved on the user's own configuration: one step under many layouts against a float64 reference."""
