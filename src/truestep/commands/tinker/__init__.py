"""The Tinker protocol: training and sampling by the client `tinker`, over sessions of this process.

wire         protobuf messages, as bytes
requests     data of requests: documents to score, and how to sample
scoring      log-probs of prompts and their alternatives
checkpoints  saved weights on the disk, with time to live
bodies       the bodies of requests
state        tenants' sessions, models, samplers and futures
jobs         what is computed, one job after another
app, rest    the routes: what is asked for, and looks at what there is
tenants      tenants by their keys
serving      the protocol beside the endpoint of `truestep serve`
"""
