"""The choice of a token from its logits: parameters, penalties, filters, the draw, and log-probabilities."""
