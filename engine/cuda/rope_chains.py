"""What ``engine/cuda/rope.py`` does, and before it the sums of the chains of q, k and v, in passes of many rows.

Formula: q, k, v = ((0 + chain_0) + chain_1) + ..., of chains that blocks of their product have shared; then as in ``rope``.
Shapes: chains as in ``engine/cuda/products/warpgroup_matmul.py``, of the weight rows of q, then of k, then of v; all others
    as in ``rope``.
Who owns what: a block owns a head of 8 rows, a tile of the chains, because one row has only a fourth of each sector of 32
    bytes.  Its 8 warps add the chains of 16 elements of the 8 rows each, in turn; then each has the head of one row, as in
    ``rope``.
Reduction order: that of ``engine/cuda/products/matmul.py``; then that of ``rope``.
Bytes moved: 32 in, for eight chains, and as many out per element as in ``rope``.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.products.warpgroup_matmul import make_add_chains
from engine.cuda.rope import make_heads
from engine.cuda.runtime.compiler import F32P, I32P, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS

I = np.int32  # noqa: E741
U = np.uint32

ROWS = 8
"""Rows of a block, those of a tile of chains, and its warps."""
BLOCK = 32 * ROWS
"""Threads of a block."""
MOST_ELEMENTS = 256
"""The most elements of a head: larger ones take so many registers that few blocks share a multiprocessor."""


def takes(d_k: int, d_v: int) -> bool:
    """Whether there is a kernel for heads of these sizes, which have whole tiles of 16 weight rows."""
    return all(d % 16 == 0 and d <= MOST_ELEMENTS for d in (d_k, d_v))


def grid(rows: int, n_head: int, n_head_kv: int) -> tuple[int, int]:
    """A block for each head of q, k and v and each tile of 8 rows."""
    return n_head + 2 * n_head_kv, -(-rows // ROWS)


def _make_receive(d: int, tiles: int) -> DeviceFunction:
    """The device function ``receive((chains, n_chains, sums))``: add the chains of a head of d elements and 8 rows, of
    which the first is at chains; returns where the warp's row is in shared memory, sums [8, pitch]."""
    strips, pitch, add_chains = d // 16, _pitch(d), make_add_chains(tiles)

    @device
    def receive(given):
        chains, n_chains, sums = given
        values = cuda.local.array(4, np.float32)
        lane, warp = I(cuda.threadIdx.x & 31), I(cuda.threadIdx.x >> 5)
        wait_for_inputs()
        for j in range(-(-strips // ROWS)):
            strip = I(warp + ROWS * j)
            if strip < strips:
                add_chains(advance(chains, I(strip * (CHAINS * tiles * 128) + 4 * lane)), n_chains, values)
                for e in range(4):
                    to = I(I(2 * (lane & 3) + (e & 1)) * pitch + I(16 * strip + (lane >> 2) + 8 * (e >> 1)))
                    sums[to] = values[e]
        cuda.syncthreads()
        return advance(sums, I(warp * pitch))

    return receive


def _pitch(d: int) -> int:
    """Words from a row of the sums to the next one, such that the stores of a warp meet in no bank."""
    return d + 4


@kernel(
    *(F32P, i32, i32, I32P, I32P, I32P, I32P, F32P, *[F32P] * 6),
    *(f32, f32, i32, i32, i32, i32, U32P, F32P, U32P, U32P),
    threads=BLOCK,
    target=TARGET,
)
def rope_chains(
    k_type: str,
    v_type: str,
    d_k: int,
    d_v: int,
    n_rot: int,
    neox: bool,
    normed: bool,
    biased: bool,
    v_normed: bool,
    norm_after: bool,
    scaled: bool,
    tiles: int,
) -> KernelCode:
    """The kernel for one kind of layer: ``rope`` with these constants, ``early``, and not ``gated`` or ``noted``.

    tiles: the tiles of 8 rows of a block of the product.

    Arguments: chains, n_chains (the number of chains that have units), rows, then those of ``rope`` from positions on,
    without new.
    Grid: ``grid(rows, n_head, n_head_kv)``, blocks of ``BLOCK`` threads.
    """
    strips_k, strips_v, pitch = d_k // 16, d_v // 16, _pitch(d_k)
    n_sums = ROWS * max(pitch, _pitch(d_v))

    @device
    def meet():
        cuda.syncwarp()

    how = neox, normed, biased, True, v_normed, False, norm_after, scaled
    receivers = _make_receive(d_k, tiles), _make_receive(d_v, tiles)
    keep_head, keep_value = make_heads(k_type, v_type, d_k, d_v, n_rot, *how, *receivers, meet)

    @cuda.jit
    def rope_chains(
        chains,
        n_chains,
        rows,
        positions,
        places,
        sequences,
        table,
        angles,
        q_norm,
        k_norm,
        q_bias,
        k_bias,
        v_bias,
        factors,
        eps,
        scale,
        n_head,
        pages,
        stride,
        mixed,
        q_out,
        q_scales,
        keys,
        values,
    ):
        let_next_begin()
        tile, warp, head = I(cuda.blockIdx.y), I(cuda.threadIdx.x >> 5), I(cuda.blockIdx.x)
        n_head_kv = I((cuda.gridDim.x - n_head) >> 1)
        is_q, before = head < n_head, I(n_head + n_head_kv)
        row = I(ROWS * tile + warp)
        there = row < rows
        # A row past the last one reads what belongs to the last one.
        row = min(row, I(rows - 1))
        sequences = advance(sequences, I(row * mixed))
        sums = pointer(cuda.shared.array(n_sums, np.float32))
        # The head's first tile of 16 weight rows.
        above, strip = I(U(tile) // U(tiles)), I(head * strips_k)
        if head >= before:
            strip = I(before * strips_k + I(head - before) * strips_v)
        strip = I(I(above * I(before * strips_k + n_head_kv * strips_v)) + strip)
        at = np.int64(strip) * (CHAINS * tiles * 128) + I(128 * I(tile - above * tiles))
        given = advance(chains, at), n_chains, sums
        if head >= before:
            head = I(head - before)
            # Slots are written only between launches.
            table = advance(table, I(sequences[0] * stride))
            keep_value(given, there, v_bias, head, places, row, table, pages, eps, values, values)
            return
        bias, norm = q_bias, q_norm
        if not is_q:
            head, bias, norm = I(head - n_head), k_bias, k_norm
        keep_head(
            given,
            there,
            advance(sums, I(warp * pitch)),
            is_q,
            bias,
            norm,
            head,
            row,
            positions,
            places,
            sequences,
            table,
            stride,
            angles,
            factors,
            eps,
            scale,
            n_head,
            pages,
            q_out,
            q_scales,
            keys,
            keys,
        )

    return rope_chains
