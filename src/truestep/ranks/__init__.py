"""The processes of a run: layout, groups, communication, and a watch for stalls.

axes              the dimensions of parallelism and the layout of ranks
group             process groups and communication between ranks; one process is a run of one rank
exchange          all-gather and reduce-scatter of tokens, with their gradients
pipeline          stages of a pipeline, and their groups
peers             sums and gathers through GPU memory that all ranks of a machine can read
peer_kernels      the Triton kernels of peers
elastic           the agent of torch's elastic launcher
keeper            the program that keeps parts of a run's state in memory; keeper_client: what ranks ask it
watch             ends a run that stalls, or whose rank failed, and names the cause
place             where in the code the main thread is, for the watch
processes         activity of processes, by the operating system, for the watch
launch            starts ranks on this machine, for `verify` and tests
forks, preload    the server from which these ranks are forked, and its imports
"""
