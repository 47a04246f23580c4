"""The GPU backend: a kernel per operation, each the twin of the function of the same name in ``engine/cpu``."""
