"""Faults that are planted in src, one at a time, to see that the tests find each of them. `make faults` does it.

planted/*.yaml    the faults, by room
listed            reads the list, and checks it against the code and the tests
planting          copies the repository, plants a fault in the copy, and runs the tests that cover the place
"""
