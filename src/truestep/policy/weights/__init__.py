"""The weights of a rank: whole, sharded, or not read yet."""
