"""Loading a Hugging Face directory as a model, and probing it.

load              the directory becomes a model on this rank; parts: the same from a checkpoint's parts
adapting          where an adapter comes from, and how the model gets it
probe             refuses a model whose documents see each other when packed, or whose head is not linear
borrowed          a full model for the probe where there is no room: layers share the weights of one of their kind
"""
