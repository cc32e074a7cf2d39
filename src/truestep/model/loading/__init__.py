"""Loading a Hugging Face directory as a model, and probing it.

load              loads a directory as a policy on this rank, by a table of passes
read              makes the model of a directory with unread weights, and its tokenizer
from_parts        makes a model whose weights are in a checkpoint's parts
adapter_source    resolves an adapter's origin, and attaches the adapter to the model
probe             refuses a model whose values change when packed or cut, or whose head is not linear
same_experts      gives the tokens of two passes the same experts, so that probes can compare them
probe_weights     fills a model for the probes; layers of the same shapes share one layer's weights to save memory
"""
