"""The Tinker protocol: the client `tinker` trains and samples through sessions in this process.

wire         protobuf messages, as bytes
requests     converts request data: documents to score, and sampling options
scoring      log-probs of prompt tokens and of alternative tokens
checkpoints  saved weights on disk, with a time to live
bodies       reads the bodies of requests
orders       reads the requests that a model computes in their order
journal      keeps sessions, models and requests on disk
restart      goes on from the journal
objects      jobs with their results, models, samplers and sessions
work         what a job computes, by kind
state        keeps the tenants' objects
accounts     the requests of a tenant, and how much it may use
turns        whose job is computed next
jobs         computes jobs, one after another
samplers     the weights of saved samplers
answers      the answers to requests for samples
app, rest    the routes: app for training and sampling, rest for listing and deleting
tenants      tenants by their keys, with their quotas
usage        counters, quotas of tokens, and metrics for Prometheus
serving      serves the protocol together with the endpoint of `truestep serve`
"""
