"""`truestep init`: creates a directory with a complete task to modify.

make              writes the directory, from the files in templates
"""
