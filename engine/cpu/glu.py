"""Gates: gated linear units (Shazeer 2020), and the gate on the output of attention (Qiu et al. 2025).

Formula: y[i] = act(gate[i]) * up[i], act = silu (SwiGLU), the tanh form of GELU (GeGLU), or the logistic function.
Shapes: gate, up, y float32 [n]; queries and their gates: both float32 [heads, 2, d], x float32 [heads, d].
Who owns what: an item is an element; for attention, a head of a row.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import njit

from engine.numerics import gelu, sigmoid, silu


@njit(cache=True, error_model="numpy")
def swiglu(gate, up, y, first, last):  # type: ignore[no-untyped-def]
    """y = silu(gate) * up for the elements [first, last); all float32 [n]."""
    a, b, c = gate[first:last], up[first:last], y[first:last]
    for i in range(c.size):  # a loop from 0 becomes vector operations
        c[i] = silu(a[i]) * b[i]


@njit(cache=True, error_model="numpy")
def geglu(gate, up, y, first, last):  # type: ignore[no-untyped-def]
    """y = gelu(gate) * up, gelu in its tanh form, for the elements [first, last); all float32 [n]."""
    a, b, c = gate[first:last], up[first:last], y[first:last]
    for i in range(c.size):
        c[i] = gelu(a[i]) * b[i]


@njit(cache=True)
def ungated(both, x, first, last):  # type: ignore[no-untyped-def]
    """x [heads, d] = the queries of both [heads, 2, d], for the heads [first, last)."""
    for h in range(first, last):
        for i in range(x.shape[1]):
            x[h, i] = both[h, 0, i]


@njit(cache=True, error_model="numpy")
def sigmoid_gate(x, both, first, last):  # type: ignore[no-untyped-def]
    """x = x * sigmoid(gate), in place, for the heads [first, last): x float32 [heads, d], both float32 [heads, 2, d], the
    gates behind the queries of each head."""
    for h in range(first, last):
        for i in range(x.shape[1]):
            x[h, i] = x[h, i] * sigmoid(both[h, 1, i])
