"""One token on its way through the layers: what a pass computes between the embedding and the logits, and what it means."""
