"""Rollout files too large for memory: converted once to memory-mapped Arrow, which all ranks of a machine share."""
