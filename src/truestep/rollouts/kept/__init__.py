"""The rollouts that a run keeps for people to read.

keeper            takes some documents of each step; if it fails, it says so once and the run goes on
rows              what is kept of a document
files             Parquet files, complete or absent, rolled back by a restart
"""
