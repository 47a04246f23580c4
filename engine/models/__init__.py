"""A model on a backend: the configuration of its layers, its weights, and its forward pass."""
