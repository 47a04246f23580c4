"""Caches: the data that a model keeps between forward passes."""
