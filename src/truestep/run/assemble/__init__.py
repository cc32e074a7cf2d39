"""Makes the parts of a run from its configuration. Only here do options meet parts that know no configuration.

policy            the ranks and the policy on them
step              objective, runner, plans, optimizer, learning rate
sources           where documents come from: files, streams, the policy, servers
check             what compares a sampler's tokens with the policy's
rewards           the reward service
evaluation        held-out prompts or documents
sinks             what metrics and kept rollouts go to
"""
