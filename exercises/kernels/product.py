"""Kernel 9. A product with Q8_0.

out[r] = sum_k weight[r, k] x[k] for each row r < rows.

A unit has 32 weights: a float16 scale, then 32 int8; 34 bytes.  The activations are int8 q[32 u + k] with a scale d[u].

    I = sum_k w_k q_k                       an integer, exact in any order
    chain = fma(d[u], w_scale * I, chain)   from 0; chain c has the units c L .. (c + 1) L - 1, L = ceil(units / 8)
    out = ((chain_0 + chain_1) + ...) + chain_7, from 0

Any division of the work is allowed.  The simplest: a thread for each row, blocks of 32 threads.  ``halves(p)`` is the same
memory as uint16, and ``half_to_float`` converts one.
"""

from numba import cuda

from engine.cuda.runtime.compiler import F32P, i32, kernel
from exercises.stub import I8P, unwritten


@kernel(I8P, I8P, F32P, F32P, i32, i32, threads=32)
def product():
    @cuda.jit
    def product(weights, q, d, out, rows, units):
        unwritten("product")

    return product
