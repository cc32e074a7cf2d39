"""Samplers, which write rollouts: from the policy itself or from servers. Evaluation, which samples too."""
