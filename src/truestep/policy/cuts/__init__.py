"""Models cut into parts for ranks."""
