"""Mixtures of experts: a model's own router chooses, and one computation of ours runs the chosen experts.

operators   rows sorted by expert, and grouped products of them
mixture     the computation, with its backward pass
over_ranks  the same with the experts divided over ranks
grouped     the module that replaces a model family's own experts
routing     sums of what routers choose in a step, and the gradient of the routers' loss terms
routers     finds a model's routers, counts them, freezes them
"""
