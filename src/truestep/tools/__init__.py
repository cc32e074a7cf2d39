"""The commands other than training.

verify            compares a configuration under many layouts with a float64 reference
parity            measures the gap between the sampler's and the trainer's log-probs, and finds its cause
audit             finds faults in dumps of rollouts of any trainer
replay            repeats a step of a run from its records; compares runs
score             computes one step over files: log-probs, metrics, gradients
export            converts a checkpoint to a Hugging Face directory
elastic_command   writes the commands of a run whose ranks come and go
serve             serves the policy without training, and saves its conversations as documents
demo              a whole run on a tiny task
init              creates a new task to start from
"""
