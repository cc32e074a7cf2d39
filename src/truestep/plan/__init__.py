"""Plans a configuration's memory per rank and time per step, without a GPU and without reading a weight.

shape             the sizes of the model's weights, from config.json
activations       bytes that a layer saves for its backward pass, from its code on meta tensors
memory, cost      bytes and seconds by part; rates: the measured speed of the machine
search, advice    options that fit, the values of `auto`, and options that need less memory
report            the plan as `truestep plan` prints it
room, exhausted   messages when the plan exceeds the memory, and when a run ran out of memory
"""
