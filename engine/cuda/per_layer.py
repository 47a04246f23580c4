"""Per-layer embeddings (Gemma 4 E2B and E4B): what every layer receives about the token itself, all layers at once.

Formula: x = m * scale, out[i] = ((x[i] * r) * weight[i] + e[i]) * sqrt(1/2), r = 1 / sqrt(sum(x^2) / n + eps), for each run
    of n elements, which belongs to one layer.
Shapes: m, e float32 [rows, layers * n], weight float32 [n], out float32 [layers, rows, n]: each layer is contiguous.
Who owns what: a block of 256 threads owns a run of n.
Reduction order: r as in ``engine/cuda/rms_norm.py``; then fma(x * r, weight, e) * float32(sqrt(1/2)).
Bytes moved: 12 n per layer and row.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import fma, inverse_root, let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741

ROOT_HALF = f32(0.5**0.5)


@kernel(F32P, F32P, F32P, f32_t, f32_t, F32P, threads=256)
def per_layer_inputs(n: int) -> KernelCode:
    """The inputs of all layers for all rows.  Grid: (layers, rows)."""
    width = norm_width.py_func(n)
    n_x = -(-n // width)

    @cuda.jit
    def per_layer_inputs(m, e, weight, scale, eps, out):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        x = cuda.local.array(n_x, np.float32)
        other = cuda.local.array(n_x, np.float32)
        factor = cuda.local.array(n_x, np.float32)
        thread, layer, t = I(cuda.threadIdx.x), I(cuda.blockIdx.x), I(cuda.blockIdx.y)
        run = I(I(I(t * I(cuda.gridDim.x)) + layer) * n)
        place = I(I(I(layer * I(cuda.gridDim.y)) + t) * n)
        for k in range(n_x):
            factor[k] = f32(0.0)
            if thread < width and thread + k * width < n:
                factor[k] = weight[thread + k * width]
        wait_for_inputs()
        for k in range(n_x):
            x[k] = f32(0.0)
            other[k] = f32(0.0)
            if thread < width and thread + k * width < n:
                x[k] = m[run + thread + k * width] * scale
                other[k] = e[run + thread + k * width]
        total = f32(0.0)
        for k in range(n_x):
            total = fma(x[k], x[k], total)
        r = inverse_root(fold256(total, chains), f32(n), eps)
        for k in range(n_x):
            if thread < width and thread + k * width < n:
                out[place + thread + k * width] = fma(x[k] * r, factor[k], other[k]) * ROOT_HALF

    return per_layer_inputs
