"""Sums of arrays: a residual, or a bias for every row, optionally times a number; rows times a gate; products with a number.

Formula: z[i] = x[i] + y[i % m]; with a factor fma(scale, y[i % m], x[i]); with gates fma(sigmoid(gate of the row), y[i],
    x[i]); products x[i] * factor.
Shapes: x, z float32 [n]; y float32 [m], m = n for a residual; with gates x, y, z float32 [rows, n] and gates float32 [rows,
    m], of which the last column counts.
Who owns what: an item is an element; with a bias, a factor of y or gates, a row.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import njit

from engine.numerics import fma, sigmoid


@njit(cache=True, error_model="numpy")
def add(x, y, z, first, last):
    """z = x + y, elements [first, last); all float32 [n]."""
    a, b, c = x[first:last], y[first:last], z[first:last]
    for i in range(c.size):  # a loop from 0 becomes vector operations
        c[i] = a[i] + b[i]


@njit(cache=True, error_model="numpy")
def add_bias(x, bias, z, first, last):
    """z = x + bias for the rows [first, last): x, z float32 [rows, n], bias float32 [n]."""
    for t in range(first, last):
        for i in range(bias.size):
            z[t, i] = x[t, i] + bias[i]


@njit(cache=True, error_model="numpy")
def add_scaled(x, y, scale, z, first, last):
    """z = x + scale * y for the rows [first, last): x, z float32 [rows, n], y float32 [rows, n] or [1, n]."""
    for t in range(first, last):
        a, b, c = x[t], y[t if y.shape[0] > 1 else 0], z[t]
        for i in range(c.size):
            c[i] = fma(scale, b[i], a[i])


@njit(cache=True, error_model="numpy")
def add_gated(x, y, gates, z, first, last):
    """z = x + sigmoid(gate) * y for the rows [first, last): x, y, z float32 [rows, n], gates float32 [rows, m]."""
    for t in range(first, last):
        gate = sigmoid(gates[t, gates.shape[1] - 1])
        a, b, c = x[t], y[t], z[t]
        for i in range(c.size):
            c[i] = fma(gate, b[i], a[i])


@njit(cache=True, error_model="numpy")
def scale(x, factor, z, first, last):
    """z = x * factor, elements [first, last); all float32 [n]."""
    a, c = x[first:last], z[first:last]
    for i in range(c.size):
        c[i] = a[i] * factor
