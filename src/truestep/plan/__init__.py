"""What a configuration needs of each rank's memory and how long a step takes, without a GPU or reading a weight.

shape             the sizes of the weights, from config.json
activations       what a layer saves for its backward pass, by running its code on meta tensors
memory, time      GiB and seconds by part
search, advice    the fastest layout that fits, and options that need less; what `auto` becomes
report            the plan as `truestep plan` prints it; exhausted: the message when the memory runs out
"""
