"""The GPU backend: one kernel per operation, each the counterpart of the function of the same name in ``engine/cpu``."""
