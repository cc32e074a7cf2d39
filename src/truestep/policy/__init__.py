"""A Hugging Face model as a policy: load, attention over packed documents, float32 weights, save."""
