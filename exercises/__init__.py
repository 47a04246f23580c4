"""Faults to find and kernels to write: ``python -m exercises``.  ``docs/exercises.md`` describes them."""
