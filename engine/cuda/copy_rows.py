"""The rows of a pass from the memory of one GPU to that of another one, which reads them in every layer.

Formula: none, numbers are copied.
Shapes: tokens, positions, sequences int32 [rows]; out int32 [3, rows], the same one after another.
Who owns what: a thread owns every 256th row.
Reduction order: none.
Bytes moved: 12 per row over the link, 12 to memory.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

I = np.int32  # noqa: E741


@kernel(I32P, I32P, I32P, i32, I32P, threads=256)
def copy_rows() -> KernelCode:
    """Grid: 1."""

    @cuda.jit
    def copy_rows(tokens, positions, sequences, rows, out):
        let_next_begin()
        row = I(cuda.threadIdx.x)
        wait_for_inputs()
        while row < rows:
            token, position, sequence = tokens[row], positions[row], sequences[row]
            out[row], out[rows + row], out[2 * rows + row] = token, position, sequence
            row = I(row + 256)

    return copy_rows
