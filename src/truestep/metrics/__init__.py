"""Metrics, whose types say how they are reduced, and the sinks that they are logged to.

types             `Sum`, `Mean`, `Max` and the others: merged over micro-batches, ranks and chunks alike
sinks             metrics.jsonl, Weights & Biases, TensorBoard, trackio
spent             where the time of a step went
tables            a step's numbers on the terminal
"""
