"""Makes the parts of a run from its configuration. The parts themselves do not read the configuration.

policy            the ranks and the policy
step              objective, runner, plans, optimizer, learning rate
sources           sources of documents: files, streams, the policy, servers
check             the check of a sampler's log-probs and tokens
servers           inference servers, including those that the run starts
rewards           the reward service
evaluation        the evaluation of held-out prompts or documents
sinks             the sinks of metrics and kept rollouts
observers         sinks, kept rollouts, callbacks and publication in their order
"""
