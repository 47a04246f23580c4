"""Caches: what a model remembers between forward passes."""
