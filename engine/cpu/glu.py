"""Gates: gated linear units (Shazeer 2020), and the gate on the output of attention (Qiu et al. 2025).

Formula: y[i] = act(gate[i]) * up[i], act = silu (SwiGLU), the tanh form of GELU (GeGLU), or the logistic function.
Shapes: gate, up, y float32 [n].
Who owns what: one call, one thread.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import njit

from engine.numerics import gelu, sigmoid, silu


@njit(cache=True, error_model="numpy")
def swiglu(gate, up, y):  # type: ignore[no-untyped-def]
    """y = silu(gate) * up; all float32 [n]."""
    for i in range(y.size):
        y[i] = silu(gate[i]) * up[i]


@njit(cache=True, error_model="numpy")
def geglu(gate, up, y):  # type: ignore[no-untyped-def]
    """y = gelu(gate) * up, gelu in its tanh form; all float32 [n]."""
    for i in range(y.size):
        y[i] = gelu(gate[i]) * up[i]


@njit(cache=True, error_model="numpy")
def sigmoid_gate(x, gate):  # type: ignore[no-untyped-def]
    """x = x * sigmoid(gate), in place; x float32 [rows, n_head, d]; gate as stored behind the queries of each head."""
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i in range(x.shape[2]):
                x[t, h, i] = x[t, h, i] * sigmoid(gate[t, h, i])
