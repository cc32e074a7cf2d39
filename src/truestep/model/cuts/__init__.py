"""Models cut into parts for ranks.

layers            the one rule that finds a model's decoder layers
tensor            tensor parallelism, by the plan that comes with the model
stages            pipeline parallelism: a stage is the whole model with the layers of other ranks left out
pieces            which part of each weight of the uncut model every rank has
blocks            blocks of rows that share a scale (8-bit states): no cut comes between them
"""
