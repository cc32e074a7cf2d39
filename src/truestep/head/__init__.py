"""The head: log-probabilities from hidden states, and gradients back. It knows no loss; no loss sees a logit."""
