"""What happens to q, k and v between the projections and attention, in one kernel: bias, head norm, rotation, append.

Formula: x = x + bias; q and k: y = (x * r) * weight, r = 1 / sqrt(sum(x^2) / d_k + eps), then for pair i of a head
    (a, b) -> (a cos - b sin, a sin + b cos); q goes to a buffer, k and v to their positions of the cache.
Shapes: q float32 [rows, n_head, d_k], or [rows, n_head, 2, d_k] with gates behind the queries of each head; k [rows,
    n_head_kv, d_k], v [rows, n_head_kv, d_v]; rows q_stride, k_stride, v_stride elements apart; positions int32 [rows]; table
    float32 [positions, 2, n_rot / 2] (cos, sin); norm weights float32 [d_k], biases float32 [heads, d]; q_out float32 [rows,
    n_head, d_k]; keys [n_head_kv, chunks, d_k, 64], values [n_head_kv, chunks, 64, d_v], float32 or the bits of float16; new
    [rows, n_head_kv, d_k + d_v]: the bits of what is appended, a word per element, for attention that has looked at the cache
    before.
Who owns what: a warp is a block and owns one head of one row; lane l owns elements l, l + 32, ... and pairs l, l + 32, ...
Reduction order: ``engine/cpu/rms_norm.py``: chain c of W owns elements i with i % W == c, one fma(x, x, chain) each in
    rising i, W = 256 or the smallest power of two >= d_k; then the halving tree, its last levels as exchanges between lanes.
    Rotation: fma(a, cos, -(b sin)) and fma(a, sin, b cos).
Bytes moved: 4 in, and 4 (q), 4 + 2 or 4 + 4 (k, v) out per element.
"""

import math
from typing import Any

import numpy as np
from numba import cuda

from engine.cache.kv import CHUNK
from engine.cuda.compiler import F32P, I32P, U16P, U32P, Specialization, f32, i32, kernel
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import (
    advance,
    float_bits,
    float_to_half,
    fma,
    let_next_begin,
    pointer,
    wait_for_inputs,
)
from engine.cuda.unpack import device

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

BLOCK = 32
"""Threads of a block."""

_ARGUMENTS = (F32P, F32P, F32P, i32, i32, i32, I32P, F32P, *[F32P] * 5, f32, i32, i32, F32P, U32P)


def rope(
    half: bool, d_k: int, d_v: int, n_rot: int, neox: bool, normed: bool, biased: bool, early: bool, gated: bool
) -> Specialization:
    """The kernel for a kind of layer.

    ``half``: the cache holds float16; ``neox``: pairs are (i, i + n_rot / 2), else (2i, 2i + 1); ``normed``: heads of q and
    k are normalized first; ``biased``: q, k and v have biases; ``early``: no kernel of the same chain writes ``positions``,
    so they and the table are read before its turn has come; ``gated``: gates, which are left alone, lie behind the queries
    of each head.

    Arguments: q, k, v, q_stride, k_stride, v_stride, positions, table, q_norm, k_norm, q_bias, k_bias, v_bias, eps, n_head,
    chunks, q_out, new, keys, values; unused pointers are not read.
    Grid: ``grid(rows, n_head, n_head_kv)``, blocks of ``BLOCK`` threads.
    """
    return (rope_half if half else rope_float)(d_k, d_v, n_rot, neox, normed, biased, early, gated)


def grid(rows: int, n_head: int, n_head_kv: int) -> tuple[int, int]:
    """A block per head of q, k and v and per row; with no head of q, keys and values are stored and nothing else is done."""
    return n_head + 2 * n_head_kv, rows


@kernel(*_ARGUMENTS, U16P, U16P, threads=BLOCK)
def rope_half(d_k: int, d_v: int, n_rot: int, neox: bool, normed: bool, biased: bool, early: bool, gated: bool) -> Any:
    """With a float16 cache."""
    return _make_rope(True, d_k, d_v, n_rot, neox, normed, biased, early, gated)


@kernel(*_ARGUMENTS, F32P, F32P, threads=BLOCK)
def rope_float(d_k: int, d_v: int, n_rot: int, neox: bool, normed: bool, biased: bool, early: bool, gated: bool) -> Any:
    """With a float32 cache."""
    return _make_rope(False, d_k, d_v, n_rot, neox, normed, biased, early, gated)


def _make_rope(
    half: bool, d_k: int, d_v: int, n_rot: int, neox: bool, normed: bool, biased: bool, early: bool, gated: bool
) -> Any:
    squares = make_squares(d_k)
    pairs = n_rot // 2
    n_x, n_pairs, n_v = -(-d_k // 32), -(-pairs // 32), -(-d_v // 32)

    @device
    def stored(x):  # type: ignore[no-untyped-def]
        """x as the cache holds it."""
        if half:
            return float_to_half(x)
        return x

    @device
    def bits(x):  # type: ignore[no-untyped-def]
        """The bits of x as the cache holds it."""
        if half:
            return U(float_to_half(x))
        return U(float_bits(x))

    @device
    def ring_place(head, position, chunks):  # type: ignore[no-untyped-def]
        """Which chunk of the cache a position of a head lies in."""
        return np.int64(I(head * chunks)) + I(U(position >> 6) % U(chunks))

    @device
    def append_value(v, bias, head, positions, row, chunks, new, values):  # type: ignore[no-untyped-def]
        lane = I(cuda.threadIdx.x)
        x = cuda.local.array(n_v, np.float32)
        added = cuda.local.array(n_v, np.float32)
        for j in range(n_v):
            added[j] = F(0.0)
            if biased and lane + 32 * j < d_v:
                added[j] = bias[head * d_v + lane + 32 * j]
        if not early:
            wait_for_inputs()
        position = positions[row]
        if early:
            wait_for_inputs()
        to = advance(values, (ring_place(head, position, chunks) * CHUNK + (position & (CHUNK - 1))) * d_v)
        for j in range(n_v):
            x[j] = F(0.0)
            if lane + 32 * j < d_v:
                x[j] = v[head * d_v + lane + 32 * j]
        for j in range(n_v):
            if lane + 32 * j < d_v:
                y = x[j] + added[j] if biased else x[j]
                to[lane + 32 * j] = stored(y)
                new[lane + 32 * j] = bits(y)

    @cuda.jit
    def rope(  # type: ignore[no-untyped-def]
        q,
        k,
        v,
        q_stride,
        k_stride,
        v_stride,
        positions,
        table,
        q_norm,
        k_norm,
        q_bias,
        k_bias,
        v_bias,
        eps,
        n_head,
        chunks,
        q_out,
        new,
        keys,
        values,
    ):
        let_next_begin()
        lane = I(cuda.threadIdx.x & 31)
        row = I(cuda.blockIdx.y)
        head = I(cuda.blockIdx.x)
        n_head_kv = I((cuda.gridDim.x - n_head) >> 1)
        is_q = head < n_head
        if head >= n_head + n_head_kv:
            head = I(head - n_head - n_head_kv)
            new = advance(new, I(I(row * n_head_kv + head) * (d_k + d_v) + d_k))
            append_value(advance(v, I(row * v_stride)), v_bias, head, positions, row, chunks, new, values)
            return
        source, bias, norm = advance(q, I(row * q_stride + head * d_k if gated else row * q_stride)), q_bias, q_norm
        if not is_q:
            head = I(head - n_head)
            source, bias, norm = advance(k, I(row * k_stride)), k_bias, k_norm
        x = cuda.local.array(n_x, np.float32)
        weight = cuda.local.array(n_x, np.float32)
        added = cuda.local.array(n_x, np.float32)
        cos = cuda.local.array(n_pairs, np.float32)
        sin = cuda.local.array(n_pairs, np.float32)
        whole = pointer(cuda.shared.array(d_k, np.float32))
        for j in range(n_x):
            weight[j] = F(0.0)
            added[j] = F(0.0)
            if lane + 32 * j < d_k:
                if normed:
                    weight[j] = norm[lane + 32 * j]
                if biased:
                    added[j] = bias[head * d_k + lane + 32 * j]
        if not early:
            wait_for_inputs()
        position = positions[row]
        angles = advance(table, np.int64(position) * n_rot)
        for j in range(n_pairs):
            cos[j] = F(0.0)
            sin[j] = F(0.0)
            if lane + 32 * j < pairs:
                cos[j] = angles[lane + 32 * j]
                sin[j] = angles[pairs + lane + 32 * j]
        if early:
            wait_for_inputs()
        for j in range(n_x):
            x[j] = F(0.0)
            if lane + 32 * j < d_k:
                x[j] = source[head * d_k + lane + 32 * j]
                if biased:
                    x[j] = x[j] + added[j]
        if normed:
            r = F(1.0) / F(math.sqrt(F(squares(x) / F(d_k) + eps)))
            for j in range(n_x):
                x[j] = x[j] * r * weight[j]
        for j in range(n_x):
            if lane + 32 * j < d_k:
                whole[lane + 32 * j] = x[j]
        cuda.syncthreads()
        for j in range(n_pairs):
            i = I(lane + 32 * j)
            if i < pairs:
                first = i if neox else I(2 * i)
                second = I(i + pairs) if neox else I(2 * i + 1)
                a, b = whole[first], whole[second]
                whole[first] = fma(a, cos[j], -(b * sin[j]))
                whole[second] = fma(a, sin[j], b * cos[j])
        cuda.syncthreads()
        if is_q:
            out = advance(q_out, I(I(row * n_head + head) * d_k))
            for j in range(n_x):
                if lane + 32 * j < d_k:
                    out[lane + 32 * j] = whole[lane + 32 * j]
        else:
            new = advance(new, I(I(row * n_head_kv + head) * (d_k + d_v)))
            to = advance(keys, ring_place(head, position, chunks) * (d_k * CHUNK) + (position & (CHUNK - 1)))
            for j in range(n_x):
                if lane + 32 * j < d_k:
                    to[(lane + 32 * j) * CHUNK] = stored(whole[lane + 32 * j])
                    new[lane + 32 * j] = bits(whole[lane + 32 * j])

    return rope
