"""The update of a step.

optimizer         the optimizer, its state in checkpoints, the learning rate
optimizers        the built-in ones
clipping          the norm of the gradient, and clipping by it
blame             finds the documents or weights whose gradient is not finite
"""
