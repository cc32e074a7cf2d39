"""The processes of a run: their places and groups, what they send each other, and a watch over them.

axes              the table of dimensions (replica, shard, context, tensor, pipeline), from which groups are made
group             the ranks and what they tell each other; one process is a run of one rank
exchange          tokens that ranks exchange, with their gradients
pipeline          which rank has which stage
peers             sums through GPU memory that all ranks of a machine read
watch             ends a run that stands still and names who or what; place, processes, marks: what it looks at
launch, forks     ranks started on this machine, for `verify` and tests
"""
