"""Soft bound on logits (Gemma): y = cap * tanh(x / cap), element by element, in place.

Shapes: x float32 [n].  One call, one thread; no reduction; 8 n bytes moved.
"""

from numba import njit

from engine import numerics


@njit(cache=True, error_model="numpy")
def softcap(x, cap):  # type: ignore[no-untyped-def]
    """x = cap * tanh(x / cap), in place; x float32 [n]."""
    for i in range(x.size):
        x[i] = numerics.softcap(x[i], cap)
