"""A run's rollouts as it keeps them: samples in Parquet files for people to read, and whole records.

recorder          the observer that keeps some documents of each step; its failures never stop the run
rows              the row of a kept document
conversation      a document of several turns as blocks
reader            the text of tokens
files             writing, rolling back and thinning out the Parquet files
keeper            the observer that keeps whole records of every document; records: their files
"""
