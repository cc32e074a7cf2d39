"""Metrics, observers and sinks.

types             `Sum`, `Mean`, `Max` and others: each type defines how a metric is merged over micro-batches and ranks
loads             how evenly the routers spread a step's tokens over experts
observers         objects called on events of a run
sinks             metrics.jsonl, Weights & Biases, TensorBoard, trackio
spent             the time of a step by part
tables            a step's metrics as a table on the terminal
"""
