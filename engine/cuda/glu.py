"""Gated linear units (Shazeer 2020) with a float32 result; ``engine/cuda/products/quantize.py`` has those with an int8
result.

Formula: y[i] = act(gate[i]) * up[i], act = silu (SwiGLU) or the tanh form of GELU (GeGLU).
Shapes: gate, up, y float32 [n].
Who owns what: a thread owns one element; grid ceil(n / 256), blocks of 256.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import cuda

from engine.cuda.intrinsics import gelu, let_next_begin, silu, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode


@kernel(F32P, F32P, i32, F32P, threads=256)
def swiglu() -> KernelCode:
    """y = silu(gate) * up; all float32 [n]."""

    @cuda.jit
    def swiglu(gate, up, n, y):  # type: ignore[no-untyped-def]
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            y[i] = silu(gate[i]) * up[i]

    return swiglu


@kernel(F32P, F32P, i32, F32P, threads=256)
def geglu() -> KernelCode:
    """y = gelu(gate) * up, gelu in its tanh form; all float32 [n]."""

    @cuda.jit
    def geglu(gate, up, n, y):  # type: ignore[no-untyped-def]
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            y[i] = gelu(gate[i]) * up[i]

    return geglu
