"""The update of a step.

optimizer         the optimizer, its state in checkpoints, the learning rate
optimizers        the built-in ones
clipping          the norm of the gradient, and clipping by it
blame             which documents, or weights, make a gradient that is not finite
"""
