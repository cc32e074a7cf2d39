"""The built-in optimizers: rules for one weight at a time, and what brings weights and their states together."""
