"""Outputs of the heads of several GPUs: each GPU computes those of its own heads, gives them to the others, and quantizes
all of them.

Formula: own columns as ``combine_quantize`` (``engine/cuda/attention/combine.py``) and ``gated_norm_quantize``
    (``engine/cuda/delta_net.py``) compute them before they quantize; the others come in packets (``engine/cuda/gather.py``);
    q, d and sums of whole rows as in ``engine/cuda/products/quantize.py``.  In passes of many rows, own columns become int8
    before they are given (``engine/cuda/wide_gather.py``).
Shapes: as there, with the heads of this owner in place of all; n columns of all owners.  Heads have a multiple of 32
    elements, so the elements of a warp have one owner.
Who owns what: a thread computes, or takes, one element; a block quantizes 256 of a row, which may have several owners.  In
    ``wide_gather_combine_quantize`` a block quantizes 256 own ones of four rows, and the first blocks take words.
Reduction order: that of the kernels of one GPU.
Bytes moved: for own elements as there, and 8 for each other owner over the links; 8 per element of the others.  About 2.3
    instead of 8 where int8 is given.
"""

import numpy as np
from numba import cuda

from engine.cache.types import GROUP
from engine.cuda.attention import wide_combine
from engine.cuda.attention.combine import make_attended
from engine.cuda.attention.wide_combine import PART, ROWS
from engine.cuda.delta_net import make_gated_norm
from engine.cuda.gather import BLOCKS, PACKETS, PLACES, is_own, make_together, own_columns, own_place
from engine.cuda.intrinsics import let_next_begin, pointer, wait_for_inputs
from engine.cuda.products.quantize import ALIGNED, RUN, WARPS
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode
from engine.cuda.wide_gather import make_put, make_take, own_unit

F = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, F32P, I32P, F32P, F32P, i32, i32, *PLACES, *PACKETS, U32P, F32P, U16P, threads=RUN, blocks=BLOCKS)
def gather_combine_quantize(
    unit: int,
    n_peers: int,
    layout: int,
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    ready: bool = False,
    spans: bool = False,
) -> KernelCode:
    """Join the chunks of a row's own heads, bring all heads together, and quantize the result to int8, one scale per ``unit``
    values.

    Arguments: weights, sums, positions, gate, sink, partials, window, then those of an exchange, q, d, sums_of_q.
    n_peers: the number of other owners; layout, d_v and the further constants: those of ``combine_quantize``.
    Grid: (ceil(n / 256), rows), blocks of 256.
    """
    attended = make_attended(d_v, early, gated, rotated, sinks, group, ready, spans)
    together = make_together(unit, n_peers, layout)

    @cuda.jit
    def gather_combine_quantize(
        weights, sums, positions, gate, sink, partials, window, n, period, first, last, number, polls, here, p0, p1, p2, p3,
        p4, p5, p6, state, alarm, q, d, sums_of_q,
    ):  # fmt: skip
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        # The masks tell the compiler that nothing is negative.
        row, run = I(cuda.blockIdx.y & 0xFFFF), I(cuda.blockIdx.x & 0xFFFF)
        i = I(I(run * RUN) + I(cuda.threadIdx.x & (RUN - 32)))
        inside = i < n
        own = inside and is_own(i, period, first, last)
        at, columns = own_place(i, period, first, last), own_columns(n, period, first, last)
        x = attended(weights, sums, positions, gate, sink, row, at, own, columns, partials, window)
        peers = p0, p1, p2, p3, p4, p5, p6
        together(x, inside, own, row, run, n, number, polls, here, peers, state, alarm, tops, q, d, sums_of_q)

    return gather_combine_quantize


@kernel(
    *(F32P, F32P, I32P, F32P, F32P, i32, i32, i32, i32, *PLACES, *PACKETS, U32P),
    threads=RUN,
    blocks=wide_combine.RESIDENT,
    target=TARGET,
)
def wide_gather_combine_quantize(
    layout: int,
    n_peers: int,
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    ready: bool = False,
    spans: bool = False,
) -> KernelCode:
    """Join the chunks of own heads of many rows, and bring all heads together as int8 in a layout of ``quantize.BLOCKS``.

    Arguments: weights, sums, positions, gate, sink, partials, window, then those that follow gate and up in
    ``wide_gather_quantize`` (``engine/cuda/wide_gather.py``), without parameters of an activation.
    Grid: (rows of all blocks of rows / 4, own columns / 256), blocks of 256.
    """
    attended = wide_combine.make_attended(d_v, early, gated, rotated, sinks, group, ready, spans)
    store, take, block_rows = wide_combine.make_store(layout, make_put(n_peers)), make_take(layout), 8 * layout

    @cuda.jit
    def wide_gather_combine_quantize(
        weights, sums, positions, gate, sink, partials, window, rows, takers, n, period, first, last, number, polls, here,
        p0, p1, p2, p3, p4, p5, p6, state, alarm, out,
    ):  # fmt: skip
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        x = cuda.local.array(4, np.float32)
        # The masks tell the compiler that nothing is negative.
        warp, run = I((cuda.threadIdx.x & (RUN - 1)) >> 5), I(cuda.blockIdx.y & 0xFFFF)
        row, at = I(I(cuda.blockIdx.x & 0xFFFF) * ROWS + (warp >> 1)), I(run * RUN + (warp & 1) * PART)
        columns = I((cuda.gridDim.y & 0xFFFF) * RUN)
        attended(weights, sums, positions, gate, sink, row, at, row < rows, columns, partials, window, x)
        wait_for_inputs()
        to = out, (p0, p1, p2, p3, p4, p5, p6), number
        store(x, True, row, own_unit(run, period, first, last), n, tops, to)
        blocks = I((cuda.gridDim.x & 0xFFFF) * ROWS // block_rows)
        take(blocks, takers, n, period, first, last, number, polls, here, state, alarm, out)

    return wide_gather_combine_quantize


@kernel(F32P, F32P, F32P, f32_t, *PLACES, *PACKETS, U32P, F32P, U16P, threads=RUN, blocks=BLOCKS)
def gather_gated_norm_quantize(unit: int, n_peers: int, layout: int, d: int, swish: bool = True) -> KernelCode:
    """The gated norm of a row's own heads, each of d elements; bring all heads together, and quantize the result to int8, one
    scale per ``unit`` values.

    Arguments: x, weight [d], gate, eps, then those of an exchange, q, d, sums.
    n_peers: the number of other owners; layout, d, swish: those of ``gated_norm_quantize``.
    Grid: (ceil(n / 256), rows), blocks of 256.
    """
    normalize, together = make_gated_norm(d, swish), make_together(unit, n_peers, layout)

    @cuda.jit
    def gather_gated_norm_quantize(
        x, weight, gate, eps, n, period, first, last, number, polls, here, p0, p1, p2, p3, p4, p5, p6, state, alarm, q,
        scales, sums,
    ):  # fmt: skip
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        row, run = I(cuda.blockIdx.y & 0xFFFF), I(cuda.blockIdx.x & 0xFFFF)
        i = I(I(run * RUN) + I(cuda.threadIdx.x & (RUN - 32)))
        inside = i < n
        own = inside and is_own(i, period, first, last)
        # A warp with other columns computes on data that exists, and its result is not used.
        at = I(I(row * own_columns(n, period, first, last)) + (own_place(i, period, first, last) if own else I(0)))
        value = normalize(x, gate, weight, eps, at)
        value = value if own else F(0.0)
        peers = p0, p1, p2, p3, p4, p5, p6
        together(value, inside, own, row, run, n, number, polls, here, peers, state, alarm, tops, q, scales, sums)

    return gather_gated_norm_quantize
