"""Compressed rows: each is made of the tokens of a block, and perhaps of the block before it.

Formula: ``engine/cpu/compressor.py``.
Shapes: values, scores float32 [rows, overlap * d] of the pass; positions, sequences int32 [rows]; ape float32 [ratio, overlap
    * d]; norm float32 [d]; pending float32 [sequences, length, 2, overlap * d]; stored float32 or float16 [pages, 64, d], or
    transposed, [pages, d, 64], with the table int32 [sequences, stride].
Who owns what: ``compress``: a block of 256 threads owns a block of tokens that the pass may complete, or in a mixed pass a
    row that may complete one; a thread every 256th element; ``keep``: a thread owns an element of a row.
Reduction order: that of ``engine/cpu/compressor.py``.
Bytes moved: 8 overlap d per token that a row is made of; 16 overlap d per row of the pass.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cpu.rms_norm import NORM_CHAINS
from engine.cuda.elements import setter
from engine.cuda.intrinsics import advance, exp, finite, fma, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.rms_norm import inverse_rms
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


def items(rows: int, ratio: int, mixed: bool) -> int:
    """The number of blocks of a grid for the blocks of tokens that a pass may complete."""
    return rows if mixed else -(-rows // ratio)


def make_completed(mixed: bool) -> DeviceFunction:
    """The device function ``completed(positions, sequences, rows, ratio, item)``: the block of tokens that belongs to an
    item; -1 if the pass does not complete it, or if the item is a row that is a copy of the row before it."""

    @device
    def of_row(positions, sequences, rows, ratio, item):
        position = I(positions[item])
        if I(position + 1) % ratio != 0:
            return I(-1)
        if item > 0 and positions[item - 1] == position and sequences[item - 1] == sequences[item]:
            return I(-1)
        return I(position // ratio)

    @device
    def of_pass(positions, sequences, rows, ratio, item):
        start = I(positions[0])
        r = I(start // ratio + item)
        return r if I(r + 1) * ratio <= start + rows else I(-1)

    return of_row if mixed else of_pass


@kernel(
    *(F32P, F32P, i32, F32P, F32P, f32_t, i32, i32, I32P, I32P, F32P, i32, F32P, i32, I32P, i32, F32P),
    threads=256,
)
def compress(d: int, half: bool, transposed: bool, mixed: bool) -> KernelCode:
    """Store the rows of the blocks that the pass completes.

    Arguments: values, scores, rows, ape, norm, eps, ratio, overlap, positions, sequences, angles, n_rot, pending, length,
    table, stride, stored.  ``mixed``: rows may belong to several sequences.  Grid: (``items``,).
    """
    put, completed = setter(half), make_completed(mixed)

    @cuda.jit
    def compress(
        values,
        scores,
        rows,
        ape,
        norm,
        eps,
        ratio,
        overlap,
        positions,
        sequences,
        angles,
        n_rot,
        pending,
        length,
        table,
        stride,
        stored,
    ):
        let_next_begin()
        x = cuda.shared.array(d, np.float32)
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        width, thread = I(overlap * d), I(cuda.threadIdx.x)
        wait_for_inputs()
        item = I(cuda.blockIdx.x)
        r = completed(positions, sequences, rows, ratio, item)
        if r < 0:
            return
        end = I(I(r + 1) * ratio)
        begin = max(I(0), I(end - overlap * ratio))
        # Row ``first``, at position ``start``, is the first one of the run.
        first = item if mixed else I(0)
        sequence, start = I(sequences[first]), I(positions[first])
        if mixed:
            while first > 0 and sequences[first - 1] == sequence and positions[first - 1] == start - 1:
                first, start = I(first - 1), I(start - 1)
        page = I(table[I(sequence * stride) + r // CHUNK])
        values, scores = advance(values, first * width), advance(scores, first * width)
        pending = advance(pending, np.int64(sequence) * length * 2 * width)
        j = thread
        while j < d:
            most, total, sum_ = f32(-np.inf), f32(0.0), f32(0.0)
            for step in range(2):
                for p in range(begin, end):
                    # The second half of what the last block has, the first half of what the one before it has.
                    i = I(j + (I(I(overlap - 1) * d) if p >= r * ratio else I(0)))
                    place, old = np.int64(p - start) * width + i, np.int64(p % length) * 2 * width + i
                    b = scores[place] if p >= start else pending[old + width]
                    s = finite(b + ape[I(p % ratio) * width + i])
                    if step == 0:
                        most = max(most, s)
                    else:
                        a = values[place] if p >= start else pending[old]
                        e = exp(s - most)
                        total = total + e
                        sum_ = fma(e, a, sum_)
            x[j] = sum_ / total
            j = I(j + 256)
        cuda.syncthreads()
        factor = inverse_rms(pointer(x), I(d), eps, chains)
        angles = advance(angles, np.int64(r * ratio) * n_rot)
        at = np.int64(page) * (CHUNK * d)
        lane, tail = I(r % CHUNK), I(d - n_rot)
        j = thread
        while j < d:
            value = x[j] * factor * norm[j]
            if j >= tail:
                # The pair of this element, (a, b), and its angle.
                k = I(I(j - tail) // 2)
                pair = I(tail + 2 * k)
                a, b = x[pair] * factor * norm[pair], x[pair + 1] * factor * norm[pair + 1]
                cos, sin = angles[k], angles[n_rot // 2 + k]
                value = fma(a, cos, -(b * sin)) if j == pair else fma(a, sin, b * cos)
            place = I(j * CHUNK + lane) if transposed else I(lane * d + j)
            put(stored, at + place, value)
            j = I(j + 256)

    return compress


@kernel(F32P, F32P, i32, i32, I32P, I32P, i32, F32P, threads=256)
def keep(mixed: bool) -> KernelCode:
    """Store values and scores in the ring of their sequence; if a run has more rows than it holds, the last ones stay.
    ``mixed``: rows may belong to several sequences.  Grid: (ceil(width / 256), rows)."""

    @cuda.jit
    def keep(values, scores, rows, width, positions, sequences, length, pending):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i >= width:
            return
        sequence, position, later = I(sequences[t if mixed else I(0)]), I(positions[t]), I(t + length)
        # The row of the same run that has the same place in the ring.
        hidden = later < rows
        if mixed and hidden:
            hidden = sequences[later] == sequence and positions[later] == position + length
        if not hidden:
            place = (np.int64(sequence) * length + position % length) * 2 * width + i
            pending[place] = values[t * np.int64(width) + i]
            pending[place + width] = scores[t * np.int64(width) + i]

    return keep
