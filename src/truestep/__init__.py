"""truestep: RL fine-tuning of language models in which every step is exactly the step you asked for."""

__version__ = "0.1.0"
