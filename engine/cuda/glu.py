"""Activations of feed-forward networks with a float32 result, and gates on heads of attention; for activations with an int8
result see ``engine/cuda/products/quantize.py``.

Formula: y[i] = f(gate[i], up[i], a, b, c, d), f one of ``ACTIVATIONS`` of ``engine/numerics.py``, which may ignore the gate
    and parameters; for heads of d elements x[i] * sigmoid(gates[i // d]).
Shapes: gate, up, y float32 [n], without a gate up twice; a, b, c, d float32; x float32 [n], gates float32 [n / d].
Who owns what: a thread owns one element; grid ceil(n / 256), blocks of 256.
Reduction order: none.
Bytes moved: 12 n; 8 n without a gate.
"""

from numba import cuda

from engine.cuda.intrinsics import ACTIVATIONS, let_next_begin, sigmoid, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode


@kernel(F32P, F32P, i32, f32, f32, f32, f32, F32P, threads=256)
def activate(kind: str) -> KernelCode:
    """y = the activation ``kind`` of gate and up with the parameters a to d."""
    of = ACTIVATIONS[kind]

    @cuda.jit
    def activate(gate, up, n, a, b, c, d, y):
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            y[i] = of(gate[i], up[i], a, b, c, d)

    return activate


@kernel(F32P, F32P, i32, i32, F32P, threads=256)
def gate_heads() -> KernelCode:
    """y = x * sigmoid(gate of the head), heads of d elements."""

    @cuda.jit
    def gate_heads(x, gates, n, d, y):
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            y[i] = x[i] * sigmoid(gates[i // d])

    return gate_heads
