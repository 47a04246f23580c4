"""Compiled kernels: the sources that they depend on, where they are stored, and how many are compiled in parallel."""
