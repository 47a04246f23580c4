"""A model on a backend: its description, its weights, and one forward pass per architecture family."""
