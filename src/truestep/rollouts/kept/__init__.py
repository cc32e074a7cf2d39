"""Samples of a run's rollouts, kept in Parquet files for people to read.

recorder          the observer that keeps some documents of each step; its failures never stop the run
rows              the row of a kept document
conversation      a document of several turns as blocks
reader            the text of tokens
files             writing, rolling back and thinning out the Parquet files
"""
