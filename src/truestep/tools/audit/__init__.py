"""Audits dumps of rollouts by other trainers, and says which tokens are wrong, and how.

run               reads the dumps and runs the checks
opening           opens files; every decoder has a size limit
kept              what a run of ours has kept: joins it, and says what is lost
formats           a reader for each trainer's format, in a table
samples           the common record model of all formats, as columns
checks            the tests that make findings
table             the table of findings
model             scores some tokens, and finds the cause of a gap as `parity` does
report            the findings in a terminal and as a page
"""
