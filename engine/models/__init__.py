"""Models: their configurations, their weights, and a forward pass for each architecture family."""
