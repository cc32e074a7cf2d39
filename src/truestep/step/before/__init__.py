"""Annotations and checks of a step's documents before the first update.

annotators        add fields to documents: log-probs of a reference, the trainer's own, labels that a loss chooses
scoring           log-probs from forward passes only
chosen            the labels of Clip-Cov and KL-Cov
check             a sampler's log-probs and draws, compared with the policy's before the update
agreement         the verdict of that comparison; causes: likely reasons for a difference
"""
