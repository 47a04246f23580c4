"""A model on a backend: the description of its layers, its weights, and the forward pass that both determine."""
