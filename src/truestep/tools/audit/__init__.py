"""Audits other trainers' dumps of rollouts, and says what is wrong with which token.

run               reads the dumps and runs the checks
opening           opens files; every decoder has a ceiling
formats           a reader for each trainer's format, in a table
samples           the one record model, as columns
checks            the tests behind the findings
table             the table of findings
model             scores some tokens, and attributes a gap as parity does
report            the findings in a terminal and as a page
"""
