"""What the kernels to write import."""

from numba import types

I8P = types.CPointer(types.int8)
"""A pointer to int8, as an argument of a kernel."""


class Unwritten(Exception):
    """A kernel is still the one that came with the repository."""


def unwritten(name: str) -> None:
    """Raise Unwritten."""
    raise Unwritten(f"{name} is not written yet: replace the call of unwritten in exercises/kernels/{name}.py.")
