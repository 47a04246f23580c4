"""Gated linear units (Shazeer 2020).

Formula: y[i] = act(gate[i]) * up[i], act = silu (SwiGLU) or the tanh form of GELU (GeGLU).
Shapes: gate, up, y float32 [n].
Who owns what: one call, one thread.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import njit

from engine.numerics import gelu, silu


@njit(cache=True, error_model="numpy")
def swiglu(gate, up, y):  # type: ignore[no-untyped-def]
    """y = silu(gate) * up."""
    for i in range(y.size):
        y[i] = silu(gate[i]) * up[i]


@njit(cache=True, error_model="numpy")
def geglu(gate, up, y):  # type: ignore[no-untyped-def]
    """y = gelu(gate) * up."""
    for i in range(y.size):
        y[i] = gelu(gate[i]) * up[i]
