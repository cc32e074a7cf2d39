"""Forward and backward passes of a step: its gradient and its metrics.

runner            computes the gradient and the metrics of a step's plan
schedule          the order of forward and backward passes on each pipeline rank (1F1B)
passes            runs them in this order, with transfers between stages
label_shares      divides a micro-batch's labels among context ranks
exact             log-probs that are bitwise equal to the sampler's
routes            router loss terms, and metrics of expert loads
groups            metrics of groups, completions and rewards
episodes          metrics of turns, of the ends of episodes, and of tools
"""
