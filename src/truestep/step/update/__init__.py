"""The weight update at the end of a step.

optimizer          makes the optimizer, saves and restores its state; the learning rate
optimizers         the built-in optimizers
gradient_clipping  the norm of the gradient, and clipping by it
blame              finds the documents or weights behind a gradient that cannot be used
"""
