"""Soft bound on logits (Gemma): y = cap * tanh(x / cap), element by element, in place.

Shapes: x float32 [n].  One element per thread, grid ceil(n / 256), blocks of 256; no reduction; 8 n bytes moved.
"""

from numba import cuda

from engine.cuda import intrinsics
from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode


@kernel(F32P, f32_t, i32, threads=256)
def softcap() -> KernelCode:
    """x = cap * tanh(x / cap), in place; x float32 [n]."""
    bounded = intrinsics.softcap

    @cuda.jit
    def softcap(x, cap, n):
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            x[i] = bounded(x[i], cap)

    return softcap
