"""How much of the softmax of each row belongs to each chunk: what decides which chunks of a prompt stay
(``engine/cache/thinning.py``).

Formula: ``engine/cpu/observe.py``.
Shapes: parts float32 [rows, n_head, partials, 2] (m, l), as attention writes them; places, positions, sequences (slots) int32
    [rows]; dropped int32 [slots]; sinks float32 [n_head]; masses int32 [slots * 64, chunks].  mixed: 1: each row has its own
    slot; 0: all have that of the first row.
Who owns what: ``observe``: a block owns a row; a warp M and L of every eighth head, then a thread every 256th chunk.
Reduction order: lane j of a warp owns chain j: (((0 + l_j e_j) + l_(j+32) e_(j+32)) + ...); then the halving tree of the
    lanes.
Bytes moved: 16 per row, head and chunk, and 8 per row and chunk.
"""

import numpy as np
from numba import cuda

from engine.cache.thinning import OBSERVED
from engine.cpu.observe import ONE
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import (
    advance,
    exp,
    fma,
    lane_xor,
    let_next_begin,
    pointer,
    round_product,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741

THREADS = 256
"""Threads of a block."""


@kernel(I32P, I32P, I32P, i32, i32, I32P, threads=THREADS)
def places() -> KernelCode:
    """out[t] = positions[t] - dropped[sequence of t].

    Arguments: positions, sequences, dropped, mixed, rows, out.  Grid: (ceil(rows / 256),).
    """

    @cuda.jit
    def places(positions, sequences, dropped, mixed, rows, out):
        let_next_begin()
        t = I(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        wait_for_inputs()
        if t < rows:
            out[t] = I(positions[t] - dropped[sequences[t * mixed]])

    return places


@kernel(F32P, I32P, I32P, F32P, I32P, i32, i32, threads=THREADS)
def observe(n_head: int, sinks: bool) -> KernelCode:
    """Add the masses of rows of one sequence.

    Arguments: parts, places, sequences, sink, masses, partials, chunks.  Grid: (rows,).
    """
    n_warps = THREADS // 32

    @cuda.jit
    def observe(parts, places, sequences, sink, masses, partials, chunks):
        let_next_begin()
        tops = pointer(cuda.shared.array(n_head, np.float32, ALIGNED))
        totals = pointer(cuda.shared.array(n_head, np.float32, ALIGNED))
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        row, lane, h = I(cuda.blockIdx.x), I(thread & 31), I(thread >> 5)
        wait_for_inputs()
        place = places[row]
        n = I((place >> 6) + 1)
        parts = advance(parts, np.int64(row) * (2 * n_head) * partials)
        while h < n_head:
            own = advance(parts, np.int64(h) * 2 * partials)
            top, c = F(-np.inf), lane
            while c < n:
                top = max(top, own[I(2 * c)])
                c = I(c + 32)
            for k in range(5):
                top = max(top, lane_xor(top, I(1 << k)))
            if sinks:
                top = max(top, sink[h])
            total, c = F(0.0), lane
            while c < n:
                total = fma(own[I(2 * c + 1)], exp(own[I(2 * c)] - top), total)
                c = I(c + 32)
            total = fold32(total)
            if sinks:
                total = total + exp(sink[h] - top)
            if lane == 0:
                tops[h], totals[h] = top, total
            h = I(h + n_warps)
        cuda.syncthreads()
        masses = advance(masses, np.int64(I(sequences[0] * OBSERVED + (place & (OBSERVED - 1)))) * chunks)
        c = thread
        while c < n:
            mass, own = I(0), advance(parts, np.int64(2 * c))
            for g in range(n_head):
                p = own[1] * exp(own[0] - tops[g]) / totals[g]
                mass = I(mass + round_product(p, p * ONE))
                own = advance(own, np.int64(2 * partials))
            masses[c] = I(masses[c] + mass)
            c = I(c + THREADS)

    return observe
