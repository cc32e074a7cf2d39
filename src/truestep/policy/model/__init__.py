"""What is put in place of a Hugging Face model's own code."""
