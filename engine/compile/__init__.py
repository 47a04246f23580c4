"""Compiled kernels: which sources they are made of, where they are kept, and compiling many at once."""
