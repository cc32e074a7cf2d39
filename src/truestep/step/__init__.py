"""Steps: the plans of what each step trains on, the passes that compute them, and the optimizer that applies them."""
