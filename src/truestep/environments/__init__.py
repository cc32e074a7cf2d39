"""Prompts and rewards, and tasks whose answers can be checked."""
