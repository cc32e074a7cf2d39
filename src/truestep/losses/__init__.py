"""Losses: pure functions from per-label vectors to gradient coefficients and sums. They see no logits and no config.

labels            the labels of one micro-batch, and sums over its documents
label_losses      the losses: each label's loss and its slope
client            the losses that clients of the Tinker protocol name
objective         the whole objective: loss, optional terms, denominators
corrections       importance weights for a sampler that differs from the policy (TIS, masks)
reference         the KL penalty against a reference
exploration       entropy target, Clip-Cov, KL-Cov
agreement         statistics that compare the sampler's log-probs with the policy's
measure           the metrics of a micro-batch
"""
