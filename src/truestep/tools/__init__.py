"""The commands beside training.

verify            the user's configuration under every layout, compared with float64
parity            the gap between the sampler's log-probs and the trainer's, and its cause
score             one step over files: log-probs, metrics, gradients
export            a checkpoint as a Hugging Face directory
demo              a whole run on a tiny task; init: a new task to start from
"""
