"""From a Hugging Face directory to a model that was probed."""
