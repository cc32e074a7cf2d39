"""The Tinker protocol: training and sampling by the client `tinker`, over sessions of this process.

wire         protobuf messages, as bytes
requests     data of requests: documents to score, and how to sample
losses       the losses that the client names
scoring      log-probs of prompts and their alternatives
checkpoints  saved weights on the disk, with time to live
state        tenants' sessions, models, samplers and futures
jobs         what is computed, one job after another
app          the routes
"""
