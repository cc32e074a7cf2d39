"""Sessions, for training loops in Python: they sample, compute gradients and update, with the same parts as `train`.

session    the calls
documents  the records that a call is given
losses     the losses that a call is given, and the parts that they need
gradient   the gradient of a step, over its calls
updates    the options of an update
samples    prompts, sampling options and completions
twins      asynchronous methods
"""
