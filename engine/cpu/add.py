"""Sums of arrays: a residual, or a bias for every row.

Formula: z[i] = x[i] + y[i % m].
Shapes: x, z float32 [n]; y float32 [m], m = n for a residual.
Who owns what: an item is an element; with a bias, a row.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import njit


@njit(cache=True, error_model="numpy")
def add(x, y, z, first, last):  # type: ignore[no-untyped-def]
    """z = x + y, elements [first, last); all float32 [n]."""
    a, b, c = x[first:last], y[first:last], z[first:last]
    for i in range(c.size):  # a loop from 0 becomes vector operations
        c[i] = a[i] + b[i]


@njit(cache=True, error_model="numpy")
def add_bias(x, bias, z, first, last):  # type: ignore[no-untyped-def]
    """z = x + bias for the rows [first, last): x, z float32 [rows, n], bias float32 [n]."""
    for t in range(first, last):
        for i in range(bias.size):
            z[t, i] = x[t, i] + bias[i]
