"""From hidden states to log-probabilities and back. The head knows no loss and a loss never sees a logit."""
