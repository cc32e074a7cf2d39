"""Loading a Hugging Face directory as a model, and probing it."""
