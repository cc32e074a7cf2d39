"""A Hugging Face model as a policy: loading, attention over packed documents, float32 weights, saving."""
