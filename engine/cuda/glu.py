"""Activations of feed-forward networks with a float32 result; ``engine/cuda/products/quantize.py`` has those with an int8
result.

Formula: y[i] = f(gate[i], up[i], a, b, c, d), f one of ``ACTIVATIONS`` of ``engine/numerics.py``, which may ignore the gate
    and parameters.
Shapes: gate, up, y float32 [n], without a gate up twice; a, b, c, d float32.
Who owns what: a thread owns one element; grid ceil(n / 256), blocks of 256.
Reduction order: none.
Bytes moved: 12 n; 8 n without a gate.
"""

from numba import cuda

from engine.cuda.intrinsics import ACTIVATIONS, let_next_begin, wait_for_inputs
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
