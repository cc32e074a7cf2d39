"""Models cut into parts for ranks.

tensor            tensor parallelism, by the plan in the model's configuration
experts           experts divided over ranks
stages            pipeline parallelism: a stage is the whole model, with other stages' layers replaced by pass-throughs
"""
