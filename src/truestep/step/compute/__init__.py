"""The passes of a step: its gradient and its metrics.

runner            the gradient and the metrics of a plan
schedule, passes  the order of forward and backward passes (1F1B for pipelines), as data, and the loop that runs it
label_shares      the labels of a micro-batch, divided over the ranks that share its tokens
exact             log-probs computed exactly as the sampler computed them
groups            metrics of groups and answers
"""
