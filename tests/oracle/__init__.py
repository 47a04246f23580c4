"""Logits of ``transformers`` for small random models, and the models."""
