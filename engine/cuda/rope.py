"""The steps between the projections and attention in one kernel: bias, head norm, rotation, factors of q, storing k and v.

Formula: x = x + bias; q and k: y = (x * r) * weight, r = 1 / sqrt(sum(x^2) / d_k + eps), then for pair i of a head
    (a, b) -> (a cos - b sin, a sin + b cos), or the rotation first and then the norm; then q times the factor of its
    position; v: y = x * r where its heads are normalized.  q goes to a buffer, k and v to their positions of the cache:
    the token of sequence s with place p is lane p % 64 of page table[s, p // 64].
    Where the cache is quantized, q and k, or v, are then rotated block by block, and q, times the scale of attention, becomes
    int8 (``engine/cuda/quantized_cache.py``).
Shapes: q float32 [rows, n_head, d_k], or [rows, n_head, 2, d_k] with gates behind the queries of each head; k [rows,
    n_head_kv, d_k], v [rows, n_head_kv, d_v], which may be k; rows q_stride, k_stride, v_stride elements apart; positions
    int32 [rows]; places int32 [rows], where keys and values are stored (``engine/cache/thinning.py``); sequences int32
    [rows]; table int32 [sequences, stride]; angles float32 [positions, 2, n_rot / 2] (cos, sin), n_rot 0: no rotation; norm
    weights float32 [d_k], biases float32 [heads, d]; factors float32 [positions]; q_out words [rows, n_head, d_k] of float32,
    or [rows, n_head, d_k / 4] of int8 with q_scales float32 [rows, n_head, d_k / 32], or [rows, n_head, 2, d_k / 4] with a
    scale for each block (``engine/cuda/integer_cache.py``); keys, values: words [n_head_kv, pages, ...]
    (``engine/cache/kv.py``, ``engine/cache/types.py``); new [rows, n_head_kv, d_k + d_v]: the bits of what is appended, one
    word per element, for attention that has read the cache earlier; only if keys and values are of the same unquantized type.
Who owns what: a warp is a block and owns one head of one row; lane l owns elements l, l + 32, ... and pairs l, l + 32, ...
Reduction order: ``engine/cpu/rms_norm.py``: chain c of W owns elements i with i % W == c, one fma(x, x, chain) each in
    rising i, W = 256 or the smallest power of two >= d_k; then the halving tree, its last levels as exchanges between lanes.
    Rotation: fma(a, cos, -(b sin)) and fma(a, sin, b cos).
Bytes moved: 4 in, and 4 (q), 4 + 2 or 4 + 4 (k, v), or about 1 out per element.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CACHE_TYPES, CHUNK, CacheType
from engine.cpu.rms_norm import NORM_CHAINS
from engine.cuda.fold import make_squares
from engine.cuda.integer_cache import make_rotate, make_store_query
from engine.cuda.integer_cache import make_store as make_integer_store
from engine.cuda.intrinsics import (
    advance,
    finite,
    float_bits,
    fma,
    halves,
    inverse_root,
    let_next_begin,
    pointer,
    stored_half,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.quantized_cache import make_store, rotate, store_query
from engine.cuda.rms_norm import inverse_rms
from engine.cuda.runtime.compiler import F32P, I32P, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

BLOCK = 32
"""Threads of a block."""

_ARGUMENTS = (
    *(F32P, F32P, F32P, i32, i32, i32, I32P, I32P, I32P, I32P, F32P, *[F32P] * 6),
    *(f32, f32, i32, i32, i32, i32, U32P, F32P, *[U32P] * 3),
)


def grid(rows: int, n_head: int, n_head_kv: int) -> tuple[int, int]:
    """One block per head of q, k and v and per row; n_head is 0 if only keys and values are stored, n_head_kv is 0 if there
    are only queries."""
    return n_head + 2 * n_head_kv, rows


def notes(k_type: CacheType, v_type: CacheType) -> bool:
    """Whether what is appended is also written to ``new``."""
    return k_type == v_type and not k_type.quantized


@device
def put_half(page, i, x):
    """Store x as element i of a page of float16; returns its bits."""
    bits = stored_half(x)
    halves(page)[i] = bits
    return U(bits)


@device
def put_float(page, i, x):
    """Store x as element i of a page of float32; returns its bits."""
    bits = U(float_bits(finite(x)))
    page[i] = bits
    return bits


def _make_append(kind: CacheType, d: int, by_position: bool, noted: bool) -> DeviceFunction:
    """The device function ``append(x, pages, page, j, new)``: store a head of d elements, the lane's in x, in lane j of a
    page of keys, or of values (``by_position``); ``noted``: also write their bits, one word each, to new."""
    n_x = -(-d // 32)

    if kind.whole:
        n_words = kind.chunk_words(d)
        rotate_head, store_head = make_rotate(d, kind.block(d)), make_integer_store(kind, d, by_position)

        @device
        def append_integers(x, pages, page, j, new):
            rotate_head(x)
            store_head(advance(pages, page * n_words), j, x)

        return append_integers

    if kind.quantized:
        n_words = kind.chunk_words(d)
        store = make_store(d, kind.bits, by_position)

        @device
        def append_blocks(x, pages, page, j, new):
            to = advance(pages, page * n_words)
            for b in range(n_x):
                store(to, j, b, rotate(x[b]))

        return append_blocks

    put, n_words = put_half if kind.bits == 16 else put_float, kind.integer_words(d)

    @device
    def append(x, pages, page, j, new):
        lane = I(cuda.threadIdx.x & 31)
        to = advance(pages, page * n_words)
        for k in range(n_x):
            i = I(lane + 32 * k)
            if i < d:
                bits = put(to, I(j * d + i) if by_position else I(i * CHUNK + j), x[k])
                if noted:
                    new[i] = bits

    return append


def make_heads(
    k_type: str,
    v_type: str,
    d_k: int,
    d_v: int,
    n_rot: int,
    neox: bool,
    normed: bool,
    biased: bool,
    early: bool,
    v_normed: bool,
    noted: bool,
    norm_after: bool,
    scaled: bool,
    receive_k: DeviceFunction,
    receive_v: DeviceFunction,
    meet: DeviceFunction,
) -> tuple[DeviceFunction, DeviceFunction]:
    """The device functions ``keep_head`` and ``keep_value``, with which a warp finishes a head of one row, of q or k, or of
    v: bias, norm, rotation, storing.

    Constants: those of ``rope``.  ``receive_k(given)`` and ``receive_v(given)`` wait for the inputs, unless ``early`` is
    False, and return where the elements of the head are.  ``meet()`` waits for the other lanes of the warp.

    keep_head(given, there, whole, is_q, bias, norm, head, row, positions, places, sequences, table, stride, angles, factors,
    eps, scale, n_head, pages, q_out, q_scales, new, keys) and keep_value(given, there, bias, head, places, row,
    table, pages, eps, new, values): there: whether the row exists; whole: shared memory for the elements of a head of q or
    k, which may be where these already are; sequences: from that of the row on; table, of ``keep_value``: the pages of the
    row's sequence; new: where the words of the head are noted; otherwise arguments of ``rope``.
    """
    squares, v_squares = make_squares(d_k), make_squares(d_v)
    pairs = n_rot // 2
    n_x, n_pairs, n_v = -(-d_k // 32), max(1, -(-pairs // 32)), -(-d_v // 32)
    norm_first, norm_last = normed and not norm_after, normed and norm_after
    k_kind, v_kind = CACHE_TYPES[k_type], CACHE_TYPES[v_type]
    quantized, by_integers, noted = k_kind.quantized, k_kind.whole, noted and notes(k_kind, v_kind)
    blocks = d_k // k_kind.block(d_k) if by_integers else 0
    rotate_query = make_rotate(d_k, k_kind.block(d_k)) if by_integers else None
    store_integers = make_store_query(d_k, k_kind.block(d_k)) if by_integers else None
    append_key, append_value = _make_append(k_kind, d_k, False, noted), _make_append(v_kind, d_v, True, noted)

    @device
    def keep_value(given, there, bias, head, places, row, table, pages, eps, new, values):
        lane = I(cuda.threadIdx.x & 31)
        x = cuda.local.array(n_v, np.float32)
        added = cuda.local.array(n_v, np.float32)
        for j in range(n_v):
            added[j] = F(0.0)
            if biased and lane + 32 * j < d_v:
                added[j] = bias[head * d_v + lane + 32 * j]
        if not early:
            wait_for_inputs()
        place = places[row]
        page = np.int64(I(head * pages + table[place >> 6]))
        v = receive_v(given)
        if not there:
            return
        for j in range(n_v):
            x[j] = F(0.0)
            if lane + 32 * j < d_v:
                x[j] = v[lane + 32 * j]
                if biased:
                    x[j] = x[j] + added[j]
        if v_normed:
            r = inverse_root(v_squares(x), F(d_v), eps)
            for j in range(n_v):
                x[j] = x[j] * r
        append_value(x, values, page, I(place & (CHUNK - 1)), new)

    @device
    def normalize(x, weight, eps):
        """Normalize a head of q or k, the lane's elements in x."""
        r = inverse_root(squares(x), F(d_k), eps)
        for j in range(n_x):
            x[j] = x[j] * r * weight[j]

    @device
    def keep_head(
        given,
        there,
        whole,
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
        new,
        keys,
    ):
        lane = I(cuda.threadIdx.x & 31)
        x = cuda.local.array(n_x, np.float32)
        weight = cuda.local.array(n_x, np.float32)
        added = cuda.local.array(n_x, np.float32)
        cos = cuda.local.array(n_pairs, np.float32)
        sin = cuda.local.array(n_pairs, np.float32)
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
        position, place = positions[row], I(0)
        page = np.int64(0)
        if not is_q:
            place = places[row]
            page = np.int64(I(head * pages + table[I(sequences[0] * stride + (place >> 6))]))
        if pairs > 0:
            angles = advance(angles, np.int64(position) * n_rot)
            for j in range(n_pairs):
                cos[j] = F(0.0)
                sin[j] = F(0.0)
                if lane + 32 * j < pairs:
                    cos[j] = angles[lane + 32 * j]
                    sin[j] = angles[pairs + lane + 32 * j]
        factor = F(1.0)
        if scaled and is_q:
            factor = factors[position]
        source = receive_k(given)
        if not there:
            return
        for j in range(n_x):
            x[j] = F(0.0)
            if lane + 32 * j < d_k:
                x[j] = source[lane + 32 * j]
                if biased:
                    x[j] = x[j] + added[j]
        if norm_first:
            normalize(x, weight, eps)
        if pairs > 0:
            for j in range(n_x):
                if lane + 32 * j < d_k:
                    whole[lane + 32 * j] = x[j]
            meet()
            for j in range(n_pairs):
                i = I(lane + 32 * j)
                if i < pairs:
                    first = i if neox else I(2 * i)
                    second = I(i + pairs) if neox else I(2 * i + 1)
                    a, b = whole[first], whole[second]
                    whole[first] = fma(a, cos[j], -(b * sin[j]))
                    whole[second] = fma(a, sin[j], b * cos[j])
            meet()
            for j in range(n_x):
                if lane + 32 * j < d_k:
                    x[j] = whole[lane + 32 * j]
        if norm_last:
            normalize(x, weight, eps)
        if scaled and is_q:
            for j in range(n_x):
                x[j] = x[j] * factor
        if not is_q:
            append_key(x, keys, page, I(place & (CHUNK - 1)), new)
        elif by_integers:
            at = I(row * n_head + head)
            rotate_query(x)
            for j in range(n_x):
                x[j] = x[j] * scale
            store_integers(x, advance(q_out, I(at * (d_k // 2))), advance(q_scales, I(at * blocks)))
        elif quantized:
            at = I(I(row * n_head + head) * n_x)
            words, scales = advance(q_out, I(at * 8)), advance(q_scales, at)
            for j in range(n_x):
                store_query(rotate(x[j]) * scale, j, words, scales)
        else:
            out = advance(q_out, I(I(row * n_head + head) * d_k))
            for j in range(n_x):
                if lane + 32 * j < d_k:
                    out[lane + 32 * j] = U(float_bits(x[j]))

    return keep_head, keep_value


@kernel(*_ARGUMENTS, threads=BLOCK)
def rope(
    k_type: str,
    v_type: str,
    d_k: int,
    d_v: int,
    n_rot: int,
    neox: bool,
    normed: bool,
    biased: bool,
    early: bool,
    gated: bool,
    v_normed: bool,
    noted: bool = True,
    norm_after: bool = False,
    scaled: bool = False,
) -> KernelCode:
    """The kernel for one kind of layer.

    ``k_type``, ``v_type``: of the cache; ``n_rot``: 0 for no rotation; ``neox``: pairs are (i, i + n_rot / 2), else (2i, 2i +
    1); ``normed``: heads of q and k are normalized, before their rotation or, if ``norm_after``, after it; ``biased``: q, k
    and v have biases; ``early``: positions and places do not change while the kernel before runs, so they, the table, the
    angles and the factors are read before ``wait_for_inputs``; ``gated``: gates, which are not changed, follow the queries of
    each head; ``v_normed``: heads of v are normalized, without a weight; ``noted``: what is appended is also written to
    ``new``, if ``notes`` says so; ``scaled``: queries are multiplied by the factors of their positions.

    Arguments: q, k, v, q_stride, k_stride, v_stride, positions, places, sequences, table, angles, q_norm, k_norm, q_bias,
    k_bias, v_bias, factors, eps, scale, n_head, pages, stride (chunks of a row of the table), mixed (1: rows may belong to
    several sequences, 0: all belong to that of row 0), q_out, q_scales, new, keys, values; unused pointers are not read.
    Grid: ``grid(rows, n_head, n_head_kv)``, blocks of ``BLOCK`` threads.
    """

    @device
    def receive(given):
        if early:
            wait_for_inputs()
        return given

    @device
    def meet():
        cuda.syncthreads()

    how = neox, normed, biased, early, v_normed, noted, norm_after, scaled
    keep_head, keep_value = make_heads(k_type, v_type, d_k, d_v, n_rot, *how, receive, receive, meet)

    @cuda.jit
    def rope(
        q,
        k,
        v,
        q_stride,
        k_stride,
        v_stride,
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
        new,
        keys,
        values,
    ):
        let_next_begin()
        row = I(cuda.blockIdx.y)
        head = I(cuda.blockIdx.x)
        n_head_kv = I((cuda.gridDim.x - n_head) >> 1)
        is_q = head < n_head
        sequences = advance(sequences, I(row * mixed))
        if head >= n_head + n_head_kv:
            head = I(head - n_head - n_head_kv)
            new = advance(new, I(I(row * n_head_kv + head) * (d_k + d_v) + d_k))
            # Slots are written only between launches.
            table = advance(table, I(sequences[0] * stride))
            v = advance(v, I(row * v_stride + head * d_v))
            keep_value(v, True, v_bias, head, places, row, table, pages, eps, new, values)
            return
        source, bias, norm = advance(q, I(row * q_stride + head * (2 * d_k if gated else d_k))), q_bias, q_norm
        if not is_q:
            head = I(head - n_head)
            source, bias, norm = advance(k, I(row * k_stride + head * d_k)), k_bias, k_norm
            new = advance(new, I(I(row * n_head_kv + head) * (d_k + d_v)))
        whole = pointer(cuda.shared.array(d_k, np.float32))
        keep_head(
            source,
            True,
            whole,
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
            new,
            keys,
        )

    return rope


# --- tails -----------------------------------------------------------------------------------------------------


@kernel(F32P, F32P, f32, I32P, F32P, i32, F32P, threads=256)
def rotate_tail(d: int, normed: bool, inverse: bool) -> KernelCode:
    """y = the heads of x, normalized if there is a norm, their last n_rot elements rotated in pairs of neighbours, or back.

    A block owns a head of a row.  Grid: (heads, rows).
    """

    @cuda.jit
    def rotate_tail(x, norm, eps, positions, table, n_rot, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        t, thread, tail = I(cuda.blockIdx.y), I(cuda.threadIdx.x), I(d - n_rot)
        own = (np.int64(t) * I(cuda.gridDim.x) + I(cuda.blockIdx.x)) * d
        wait_for_inputs()
        x, y = advance(x, own), advance(y, own)
        r = inverse_rms(x, I(d), eps, chains) if normed else F(1.0)
        angles = advance(table, np.int64(positions[t]) * n_rot)
        i = thread
        while i < tail:
            y[i] = x[i] * r * norm[i] if normed else x[i]
            i = I(i + 256)
        k = thread
        while k < n_rot // 2:
            first = I(tail + 2 * k)
            a, b = x[first], x[first + 1]
            if normed:
                a, b = a * r * norm[first], b * r * norm[first + 1]
            cos, sin = angles[k], angles[n_rot // 2 + k]
            if inverse:
                sin = -sin
            y[first] = fma(a, cos, -(b * sin))
            y[first + 1] = fma(a, sin, b * cos)
            k = I(k + 256)

    return rotate_tail
