"""A checkpoint holds everything the next step depends on, and is whole or absent."""
