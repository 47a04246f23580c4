"""Compiled kernels: where they are kept, and how they are made."""
