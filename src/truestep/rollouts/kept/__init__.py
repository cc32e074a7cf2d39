"""The rollouts that a run keeps: samples in Parquet files for people to read, and complete records.

recorder          the observer that keeps some documents of each step; its failures never stop the run
rows              the row of a kept document
conversation      converts a document of several turns to blocks
reader            converts tokens to text
files             writing, rolling back and thinning out the Parquet files
keeper            the observer that keeps complete records of all documents; records: their files
"""
