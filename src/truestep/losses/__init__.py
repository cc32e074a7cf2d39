"""Losses: pure functions from per-label vectors to coefficients and sums. They never see a logit or a config.

labels            the labels of one micro-batch, and sums over its documents
label_losses      the losses: each label's loss and its slope
objective         the whole objective: loss, optional terms, denominators
corrections       importance weights for a sampler that is not quite the policy
reference         the KL penalty against a reference
exploration       entropy target, Clip-Cov, KL-Cov
agreement         sums that compare a sampler's log-probs with the policy's
measure           the metrics of a micro-batch
"""
