"""Soft bound on logits (Gemma): y = cap * tanh(x / cap), element by element, in place.

Shapes: x float32 [n].  An item is an element; no reduction; 8 n bytes moved.
"""

from numba import njit

from engine import numerics


@njit(cache=True, error_model="numpy")
def softcap(x, cap, first, last):
    """x = cap * tanh(x / cap), in place, for the elements [first, last); x float32 [n]."""
    part = x[first:last]
    for i in range(part.size):
        part[i] = numerics.softcap(part[i], cap)
