"""Activations of feed-forward networks, and gates on the output of attention (Qiu et al. 2025).

Formula: y[i] = f(gate[i], up[i], a, b, c, d), f one of ``ACTIVATIONS`` of ``engine/numerics.py``, which may ignore the gate
    and parameters; for attention, x * sigmoid(gate), with a gate for each element or one for each head.
Shapes: gate, up, y float32 [n], without a gate up twice; a, b, c, d float32; queries and their gates: both float32
    [heads, 2, d], x float32 [heads, d]; gates of heads float32 [heads].
Who owns what: an item is an element; for attention, a head of a row.
Reduction order: none.
Bytes moved: 12 n; 8 n without a gate.
"""

from typing import Any

from numba import njit

from engine.compile.family import family
from engine.numerics import ACTIVATIONS, sigmoid


@family
def activate(kind: str) -> Any:
    """The kernel for an activation (its name in ``engine/ops/activation.py``)."""
    of = ACTIVATIONS[kind]

    @njit(cache=True, error_model="numpy")
    def activate(gate, up, a, b, c, d, y, first, last):
        """y = the activation of gate and up with the parameters a to d, for the elements [first, last)."""
        g, u, z = gate[first:last], up[first:last], y[first:last]
        for i in range(z.size):  # a loop from 0 becomes vector operations
            z[i] = of(g[i], u[i], a, b, c, d)

    return activate


@njit(cache=True)
def ungated(both, x, first, last):
    """x [heads, d] = the queries of both [heads, 2, d], for the heads [first, last)."""
    for h in range(first, last):
        for i in range(x.shape[1]):
            x[h, i] = both[h, 0, i]


@njit(cache=True, error_model="numpy")
def sigmoid_gate(x, both, first, last):
    """x = x * sigmoid(gate), in place, for the heads [first, last): x float32 [heads, d], both float32 [heads, 2, d], the
    gates behind the queries of each head."""
    for h in range(first, last):
        for i in range(x.shape[1]):
            x[h, i] = x[h, i] * sigmoid(both[h, 1, i])


@njit(cache=True, error_model="numpy")
def gate_heads(x, gates, y, first, last):
    """y = x * sigmoid(gates) for the heads [first, last): x, y float32 [heads, d], gates float32 [heads]."""
    for h in range(first, last):
        gate = sigmoid(gates[h])
        a, b = x[h], y[h]
        for i in range(b.size):
            b[i] = a[i] * gate
