"""Causal attention over a cache of keys and values, each chunk of 64 absolute positions on its own.

Formula: out = sum_j softmax_j(scale q . k_j) v_j over the visible positions j: lo <= j <= p, lo = max(0, p - window + 1)
    (``engine/cpu/attention.py``); this file computes the part of each chunk, and ``engine/cuda/attention/combine.py``
    joins them.
Shapes: q float32 [rows, n_head, d_k]; keys [n_head_kv, pages, d_k, 64], values [n_head_kv, pages, 64, d_v], as words of one
    float32 or two float16; sequences int32 [rows], table int32 [sequences, stride]: position j of sequence s is lane j % 64
    of page table[s, j // 64]; new [rows, n_head_kv, d_k + d_v], what the rows append, one word per element; float32 weights
    [rows, n_head, partials, 2] (maximum, sum) and sums [rows, n_head, partials, d_pad], d_pad = d_v rounded up to 32;
    partial 0 of a row is that of the first chunk that it sees.
Who owns what: a block owns every ``splits``-th chunk of a KV head and up to ``tasks`` of the (row, head) pairs that read it.
    In a mixed pass, whose rows may belong to several sequences, these are pairs of one row.  No grid depends on a position.
Reduction order: that of the mirror.  Within a chunk a thread owns a score, or two elements of the weighted sum, and a warp
    the halving tree of 64.
Bytes moved: (d_k + d_v) * element size per visible position and KV head, in a mixed pass for each row, and 4 per chunk for
    its page; 8 + 4 d_pad per (row, head, chunk) out.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP, CacheType
from engine.cache.window import longest
from engine.cuda.attention.combine import COMBINE_THREADS, PART, combine, combine_quantize, padded
from engine.cuda.attention.join import join_chunks
from engine.cuda.attention.sight import sight
from engine.cuda.attention.weigh import make_weigh
from engine.cuda.attention.wide_combine import wide_combine_quantize
from engine.cuda.gather_heads import gather_combine_quantize, wide_gather_combine_quantize
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    fma,
    lane_xor_int,
    let_next_begin,
    load2,
    load4,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, BLOCKS, NARROW
from engine.cuda.products.unpack import device, high_half, low_half
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, f32, i32, kernel
from engine.cuda.runtime.kinds import Constant, DeviceFunction, KernelCode
from engine.errors import DeviceError

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

MAX_HEAD = 256
"""The largest d_k and d_v."""
MAX_ROWS = 32
"""Rows of a sequence in a pass: each lane of a warp reads the position of one."""
PITCH = CHUNK + 4
"""Words from one pair of key dimensions to the next in shared memory: 64 plus four, so that a warp that stores vectors of two
pairs uses every bank."""
SPAN = 16
"""Positions of the weighted sum per step: with and without a check of visibility."""
SHARED_WORDS = 48 * 1024 // 4
MOST_TASKS = 8
"""(row, head) pairs of a block."""
MOST_SCRATCH = 32 << 20
"""Bytes that a launch for more rows of several sequences than narrow kernels take writes for ``combine``, unless it has only
as many rows as they take."""
FEW_PARTIALS = 128
"""The most chunks of a single row that are joined and quantized in one kernel."""
AMENDED = 8
"""New positions per step that a block writes into a chunk that it fetched before they existed."""


# --- launch geometry -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Geometry:
    """How one pass over one kind of layer is launched: kernels, grids and threads per block."""

    attend: Specialization
    attend_grid: tuple[int, int, int]
    attend_block: int
    combine: Specialization
    combine_grid: tuple[int, int, int]
    combine_block: int
    d_v: int
    early: bool
    gated: bool
    rotated: int = 0
    n_partials: int = 0
    sinks: bool = False
    together: int = GROUP
    of_spans: tuple[bool, ...] = ()

    @property
    def join(self) -> Specialization | None:
        """The kernel that joins the chunks of each group first, where a row may see many and ``combine`` would have few
        blocks, because values are rotated in large ones."""
        many = self.n_partials > FEW_PARTIALS and self.rotated > PART
        return join_chunks(self.d_v, self.early, self.together, *self.of_spans) if many else None

    @property
    def quantizes(self) -> bool:
        """Whether ``combine_quantize`` joins the chunks: not many chunks of a single row, which the many blocks of
        ``combine`` read faster, and not where the elements of a warp would belong to two heads."""
        rows = self.combine_grid[1]
        return self.d_v % PART == 0 and (rows > 1 or self.n_partials <= FEW_PARTIALS or self.join is not None)

    def quantized(self, unit: int, layout: int = NARROW) -> Specialization:
        """The kernel that joins chunks, or groups, and quantizes: ``wide_combine_quantize`` in a layout of
        ``quantize.BLOCKS``, else ``combine_quantize``."""
        if layout in BLOCKS:
            return wide_combine_quantize(layout, *self._kinds, *self.of_spans)
        further = (len(self.of_spans) > 0, layout) if layout != NARROW else self.of_spans
        return combine_quantize(unit, *self._kinds, *further)

    def gathered(self, unit: int, layout: int, n_peers: int) -> Specialization:
        """The kernel that joins chunks, or groups, of own heads, takes packets with those of ``n_peers`` other owners, and
        quantizes: grid (ceil(columns of all heads / 256), rows), blocks of 256 threads."""
        return gather_combine_quantize(unit, n_peers, layout, *self._kinds, *self.of_spans)

    def given(self, layout: int, n_peers: int) -> Specialization:
        """The kernel that joins chunks, or groups, of own heads of many rows, quantizes, and brings the heads of ``n_peers +
        1`` owners together."""
        return wide_gather_combine_quantize(layout, n_peers, *self._kinds, *self.of_spans)

    @property
    def _kinds(self) -> tuple[Constant, ...]:
        kinds = self.early, self.gated, self.rotated, self.sinks, self.together
        return self.d_v, *kinds, self.join is not None


def partials(n_ctx: int, window: int) -> int:
    """The most chunks that one row of a context of ``n_ctx`` positions sees; a window may begin inside a chunk, and a
    frame is within one or begins with one."""
    chunks, most = -(-n_ctx // CHUNK), longest(window)
    return min(chunks, (most + CHUNK - 2) // CHUNK + (1 if window > 0 else 0)) if most else chunks


def parts_of(rows: int, group: int, tasks: int, mixed: bool) -> int:
    """The number of blocks that share the (row, head) pairs of a KV head; in a mixed pass a block has pairs of one row."""
    return rows * -(-group // tasks) if mixed else -(-rows * group // tasks)


def scratch(rows: int, n_head: int, d_v: int, n_partials: int) -> tuple[int, int]:
    """Sizes, in float32 elements, of what ``attend_chunks`` writes for ``combine``: weights and sums."""
    pairs = rows * n_head * n_partials
    return 2 * pairs, pairs * padded(d_v)


def rows_at_once(rows: int, n_head: int, d_v: int, n_partials: int, mixed: bool) -> int:
    """The rows of a launch in a pass of more rows than narrow kernels take: as many as these; in a mixed pass, where a block
    has pairs of a single row, as many times 1, 2, 4 and so on as ``MOST_SCRATCH`` suffices for, or fewer, so that launches
    have equal parts."""
    most = NARROW_ROWS
    while mixed and 2 * most <= rows and 4 * sum(scratch(2 * most, n_head, d_v, n_partials)) <= MOST_SCRATCH:
        most *= 2
    return max(-(-rows // -(-rows // most)), NARROW_ROWS) if mixed else most


def takes(k_type: CacheType, v_type: CacheType, d_k: int, d_v: int) -> bool:
    """Whether the kernel of this file serves such a cache; ``engine/cuda/attention/direct.py`` serves all others."""
    return k_type == v_type and not k_type.quantized and max(d_k, d_v) <= MAX_HEAD


def geometry(
    rows: int,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    half: bool,
    n_partials: int,
    multiprocessors: int,
    early: bool,
    tasks: int = 0,
    gated: bool = False,
    past: bool = False,
    sinks: bool = False,
    together: int = GROUP,
    mixed: bool = False,
    cap: float = 0.0,
    spans: bool = False,
) -> Geometry:
    """Launches for ``rows`` rows that each see up to ``n_partials`` chunks of a cache of float16 (``half``) or float32.

    ``early``: no kernel of the same chain writes the positions, nor what earlier passes have appended, so both are read
    before ``wait_for_inputs``.  ``tasks``: (row, head) pairs per block, 0 to choose a good number.  ``gated``: the result is
    multiplied by the sigmoid of a gate.  ``past``: nothing is appended, and another kernel of the chain may have written the
    contents of the cache.  ``sinks``: heads have them.  ``together``: chunks of a group.  ``mixed``: rows may belong to
    several sequences; each is then computed as if it were the only one.  ``cap``: of scores, 0 for none.  ``spans``: rows
    have spans (``engine/ops/spans.py``) in place of last positions.
    Raises DeviceError for heads that the kernels do not support.
    """
    if max(d_k, d_v) > MAX_HEAD or d_k % 2 or d_v % 2:
        raise DeviceError(
            f'attention on a GPU takes heads of an even size up to {MAX_HEAD}, not {d_k} and {d_v}; use device="cpu".'
        )
    if rows > MAX_ROWS and not mixed:
        raise ValueError(f"at most {MAX_ROWS} rows of a sequence, not {rows}")
    group = n_head // n_head_kv
    single = mixed or rows == 1
    tasks = tasks or _tasks(group if single else rows * group, d_k, d_v, half)
    shared_by = min(4, max(1, tasks // 2))
    threads = 128 if half and max(d_k, d_v) <= 128 and tasks <= 8 else 256
    parts = parts_of(rows, group, tasks, mixed)
    # No more blocks than are resident at once, two per multiprocessor: the next kernel cannot begin before all have begun.
    splits = min(n_partials, max(1, 2 * multiprocessors // (n_head_kv * parts)))
    of_spans = (True,) if spans else ()
    return Geometry(
        attend_chunks(half, d_k, d_v, group, tasks, shared_by, threads, single, early and not past, cap, *of_spans),
        # Blocks begin in this order, x first: those of the first chunks, which exist at any position, before the others.
        (n_head_kv, parts, splits),
        threads,
        combine(d_v, early, gated, 0, sinks, together, *of_spans),
        (n_head, rows, padded(d_v) // PART),
        COMBINE_THREADS,
        d_v,
        early,
        gated,
        n_partials=n_partials,
        sinks=sinks,
        together=together,
        of_spans=of_spans,
    )


def _tasks(needed: int, d_k: int, d_v: int, half: bool) -> int:
    """(row, head) pairs per block: a power of two up to ``MOST_TASKS``, fewer where shared memory is short."""
    tasks = min(MOST_TASKS, 1 << (needed - 1).bit_length())
    while _shared_words(half, d_k, d_v, tasks) > SHARED_WORDS:
        tasks //= 2
    return tasks


def _staged(half: bool, d_k: int, d_v: int) -> bool:
    """Whether keys and values pass through shared memory; if they do not fit, they are read where they are used."""
    return half or max(d_k, d_v) <= MAX_HEAD // 2


def _apart(half: bool, d_k: int, d_v: int) -> bool:
    """Whether shared memory holds the keys and the values of a chunk at the same time: then all of a block's first chunk can
    be loaded before the new positions are written."""
    keys, values = d_k // 2 * PITCH, d_v * CHUNK // 2
    return half and keys + values + MOST_TASKS * (d_k + CHUNK) + MAX_ROWS <= SHARED_WORDS


def _tile_words(half: bool, d_k: int, d_v: int) -> tuple[int, int]:
    """Shared memory, in words, for the keys of a chunk and for its values (0: in the place of the keys)."""
    if not _staged(half, d_k, d_v):
        return 4, 0
    keys, values = (d_k // 2 * PITCH, d_v * CHUNK // 2) if half else (CHUNK * d_k, CHUNK * d_v)
    return (keys, values) if _apart(half, d_k, d_v) else (max(keys, values), 0)


def _shared_words(half: bool, d_k: int, d_v: int, tasks: int) -> int:
    return sum(_tile_words(half, d_k, d_v)) + tasks * (d_k + CHUNK) + MAX_ROWS


# --- one chunk -------------------------------------------------------------------------------------------------


def _make_copies(n_vectors: int, threads: int) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(words, load, store) for a run of 16-byte vectors: thread t moves vectors t, t + threads, ..."""
    each = -(-n_vectors // threads)
    exact = n_vectors % threads == 0
    apart = 4 * threads

    @device
    def load(p, thread, words):
        p = advance(p, thread * 4)
        for n in range(each):
            if exact or thread + n * threads < n_vectors:
                vector = load4(p, n * apart)
                for k in range(4):
                    words[4 * n + k] = vector[k]

    @device
    def store(tile, thread, words):
        tile = advance(tile, thread * 4)
        for n in range(each):
            if exact or thread + n * threads < n_vectors:
                for k in range(4):
                    tile[n * apart + k] = words[4 * n + k]

    return 4 * each, load, store


def _make_key_copies(d_k: int, threads: int) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(words, load, store) for float16 keys: a thread moves 8 positions of two dimensions and stores one word per position.

    Of 16 threads, 4 take half of one pair of dimensions, 4 half of the next, and so on, so that no two of 8 share a bank.
    """
    pairs = d_k // 2
    step = threads // 8
    each = -(-pairs // step)
    exact = pairs % step == 0
    load_apart, store_apart = step * CHUNK, step * PITCH

    @device
    def place(thread):
        return I(I(thread >> 4) * 2 + ((thread >> 2) & 1)), I(((thread >> 3) & 1) * 4 + (thread & 3))

    @device
    def load(p, thread, words):
        pair, column = place(thread)
        p = advance(p, I(pair * CHUNK + column * 4))
        for n in range(each):
            if exact or pair + n * step < pairs:
                a = load4(p, n * load_apart)
                b = load4(p, n * load_apart + CHUNK // 2)
                for k in range(4):
                    words[8 * n + k] = a[k]
                    words[8 * n + 4 + k] = b[k]

    @device
    def store(tile, thread, words):
        pair, column = place(thread)
        tile = advance(tile, I(pair * PITCH + column * 8))
        for n in range(each):
            if exact or pair + n * step < pairs:
                for k in range(4):
                    a, b = words[8 * n + k], words[8 * n + 4 + k]
                    tile[n * store_apart + 2 * k] = U((a & U(0xFFFF)) | U(b << U(16)))
                    tile[n * store_apart + 2 * k + 1] = U(U(a >> U(16)) | (b & U(0xFFFF0000)))

    return 8 * each, load, store


def _make_score_run(half: bool, shared_by: int, n: int) -> DeviceFunction:
    """The device function ``run(key, scaled, total)``: the next 2 n dimensions, n a power of two, without a loop.

    ``key``: the words of a thread's position; ``scaled``: q' of ``shared_by`` tasks, interleaved; total [shared_by]: chains.
    """
    if n > 1:
        part = _make_score_run(half, shared_by, n // 2)
        key_apart, scaled_apart = n // 2 * (PITCH if half else 2 * CHUNK), n * shared_by

        @device
        def run(key, scaled, total):
            part(key, scaled, total)
            part(advance(key, key_apart), advance(scaled, scaled_apart), total)

        return run

    @device
    def run_pair(key, scaled, total):
        if half:
            a, b = low_half(key[0]), high_half(key[0])
        else:
            a, b = bits_float(I(key[0])), bits_float(I(key[CHUNK]))
        for h in range(shared_by):
            total[h] = fma(scaled[h], a, total[h])
        for h in range(shared_by):
            total[h] = fma(scaled[shared_by + h], b, total[h])

    return run_pair


def _make_sum_run(half: bool, d_v: int, shared_by: int, n_bounds: int, masked: bool, n: int) -> DeviceFunction:
    """The device function ``run(value, weight, j, firsts, lasts, total)``: n positions from j, n a power of two, without a
    loop.

    ``value``: the words of a thread's two elements; ``weight``: p of ``shared_by`` tasks, interleaved; total [2 shared_by]:
    chains; ``masked``: only positions from firsts[h] to before lasts[h] count for task h (h = 0 where all share one bound).
    """
    if n > 1:
        part = _make_sum_run(half, d_v, shared_by, n_bounds, masked, n // 2)
        further = n // 2
        value_apart, weight_apart = further * (d_v // 2 if half else d_v), further * shared_by

        @device
        def run(value, weight, j, firsts, lasts, total):
            part(value, weight, j, firsts, lasts, total)
            part(advance(value, value_apart), advance(weight, weight_apart), I(j + further), firsts, lasts, total)

        return run

    one = n_bounds == 1

    @device
    def run_one(value, weight, j, firsts, lasts, total):
        if half:
            a, b = low_half(value[0]), high_half(value[0])
        else:
            a, b = bits_float(I(value[0])), bits_float(I(value[1]))
        for h in range(shared_by):
            x, y = fma(weight[h], a, total[2 * h]), fma(weight[h], b, total[2 * h + 1])
            if masked:
                bound = 0 if one else h
                seen = j >= firsts[bound] and j < lasts[bound]
                x = x if seen else total[2 * h]
                y = y if seen else total[2 * h + 1]
            total[2 * h] = x
            total[2 * h + 1] = y

    return run_one


def _make_amend(d_k: int, d_v: int, threads: int, n: int) -> DeviceFunction:
    """The device function ``amend(new, key_tile, value_tile, places, chunk, rows, apart, thread)``: write the keys and values
    of rows 0 .. rows - 1, at most n, that belong to the chunk into its float16 tiles.

    new: what was appended for row 0 and the block's KV head (``engine/cuda/rope.py``); rows are ``apart`` words apart.
    places: their positions.
    """
    key_pairs, items = d_k // 2, (d_k + d_v) // 2
    rounds = -(-items // threads)
    exact = items % threads == 0

    @device
    def amend(new, key_tile, value_tile, places, chunk, rows, apart, thread):
        words = cuda.local.array(n, np.uint32)
        for k in range(rounds):
            i = I(thread + k * threads)
            if exact or i < items:
                for r in range(n):
                    words[r] = U(0)
                    if n == 1 or r < rows:
                        a, b = load2(new, I(r * apart + 2 * i))
                        words[r] = U(a | U(b << U(16)))
                for r in range(n):
                    if n == 1 or r < rows:
                        place = places[r]
                        lane = I(place & (CHUNK - 1))
                        if place >> 6 == chunk:
                            if i < key_pairs:
                                key_tile[I(i * PITCH + lane)] = words[r]
                            else:
                                value_tile[I(lane * (d_v // 2) + i - key_pairs)] = words[r]

    return amend


@kernel(*(F32P, U32P, U32P, U32P, I32P, I32P, I32P, F32P, F32P, i32, i32, i32, i32, i32, f32), threads=256, blocks=2)
def attend_chunks(
    half: bool,
    d_k: int,
    d_v: int,
    group: int,
    tasks: int,
    shared_by: int,
    threads: int,
    single: bool,
    early: bool,
    cap: float = 0.0,
    spans: bool = False,
) -> KernelCode:
    """Maximum, sum and weighted values of each visible chunk.

    Arguments: q, new (``engine/cuda/rope.py``), keys, values, positions, sequences, table, weights, sums, rows, pages,
    stride (chunks of a row of the table), partials, window, scale.
    ``single``: a block has pairs of one row, whatever the sequences of the others; else all rows belong to that of row 0.
    Where shared memory holds keys and values at the same time, a block loads its first chunk before ``wait_for_inputs``, and
    writes what the rows append to it afterwards; if other rows than that of the block may append to it, it waits first.
    ``group``: query heads per KV head; ``tasks``: (row, head) pairs per block; ``shared_by``: the number of them that a
    thread serves with each key or value it has loaded; ``early``, ``cap``, ``spans``: see ``geometry``.
    Grid: (n_head_kv, ceil(rows * group / tasks), splits), or (n_head_kv, rows * ceil(group / tasks), splits) if ``single``;
    blocks of ``threads``.
    """
    parts = -(-group // tasks)
    n_sets = tasks // shared_by
    n_warps = threads // 32
    element = 1 if half else 2
    key_words, value_words = CHUNK * d_k // 2 * element, CHUNK * d_v // 2 * element
    staged = _staged(half, d_k, d_v)
    n_key, load_keys, store_keys = _make_key_copies(d_k, threads) if half else _make_copies(key_words // 4, threads)
    n_value, load_values, store_values = _make_copies(value_words // 4, threads)
    if not staged:
        n_key = n_value = 1
    key_tile_words, value_tile_words = _tile_words(half, d_k, d_v)
    apart = value_tile_words > 0
    n_amended = 1 if single else AMENDED
    amend = _make_amend(d_k, d_v, threads, n_amended) if apart else None
    n_scaled, n_scores = tasks * d_k, tasks * CHUNK
    scaled_rounds = -(-n_scaled // threads)
    scaled_exact = n_scaled % threads == 0
    weigh_rounds = -(-tasks // n_warps)
    score_rounds = -(-CHUNK * n_sets // threads)
    pairs = d_v // 2
    sum_rounds = -(-pairs * n_sets // threads)
    value_step = 1 if half else 2
    step = next(n for n in (16, 8, 4, 2, 1) if d_k // 2 % n == 0)
    n_steps = d_k // 2 // step
    key_apart, scaled_apart = step * (PITCH if half else 2 * CHUNK), 2 * step * shared_by
    value_apart, weight_apart = SPAN * (d_v // 2 if half else d_v), SPAN * shared_by
    one_row = group % shared_by == 0
    n_bounds = 1 if one_row else shared_by
    n_sums = 2 * shared_by
    score_run = _make_score_run(half, shared_by, step)
    full_run = _make_sum_run(half, d_v, shared_by, n_bounds, False, SPAN)
    masked_run = _make_sum_run(half, d_v, shared_by, n_bounds, True, SPAN)
    d_pad = padded(d_v)

    row_of, head_of, weigh, note = make_weigh(group, tasks, shared_by, threads, single, cap, spans)
    first_visible, last_visible, visible = sight(spans)

    @device
    def fetch(keys, values, at, thread, key, value):
        """Start loading a whole chunk into registers."""
        if staged:
            load_keys(advance(keys, at * key_words), thread, key)
            load_values(advance(values, at * value_words), thread, value)

    @device
    def score(tile, q, scores, thread, n):
        """Scores of the n tasks, hidden or not."""
        total = cuda.local.array(shared_by, np.float32)
        for k in range(score_rounds):
            i = I(thread + k * threads)
            own, lane = I(i >> 6), I(i & (CHUNK - 1))
            if own * shared_by < n:
                key = advance(tile, lane)
                scaled = advance(q, I(own * (d_k * shared_by)))
                for h in range(shared_by):
                    total[h] = F(0.0)
                left = I(n_steps)
                while left > 0:
                    score_run(key, scaled, total)
                    key = advance(key, key_apart)
                    scaled = advance(scaled, scaled_apart)
                    left = I(left - 1)
                for h in range(shared_by):
                    scores[i * shared_by + h] = total[h]

    @device
    def weighted_sum(tile, p, places, sums, thread, n, task0, head0, n_head, partials, window, chunk):
        """Sums of values over the visible lanes; a thread owns two elements for ``shared_by`` tasks."""
        total = cuda.local.array(n_sums, np.float32)
        firsts = cuda.local.array(n_bounds, np.int32)
        lasts = cuda.local.array(n_bounds, np.int32)
        for k in range(sum_rounds):
            i = I(thread + k * threads)
            own, pair = I(i // pairs), I(i % pairs)
            if own * shared_by < n:
                begin, end, inner_begin, inner_end = I(CHUNK), I(0), I(0), I(CHUNK)
                for h in range(n_bounds):
                    t = min(I(own * shared_by + h), I(n - 1))
                    firsts[h], lasts[h] = visible(places[row_of(I(task0 + t))], window, chunk)
                    begin, end = min(begin, firsts[h]), max(end, lasts[h])
                    inner_begin, inner_end = max(inner_begin, firsts[h]), min(inner_end, lasts[h])
                for h in range(n_sums):
                    total[h] = F(0.0)
                value = advance(tile, I(pair * value_step))
                weight = advance(p, I(own * (CHUNK * shared_by)))
                j = I(0)
                while j < end:
                    if j >= inner_begin and j + SPAN <= inner_end:
                        full_run(value, weight, j, firsts, lasts, total)
                    elif j + SPAN > begin:
                        masked_run(value, weight, j, firsts, lasts, total)
                    value = advance(value, value_apart)
                    weight = advance(weight, weight_apart)
                    j = I(j + SPAN)
                for h in range(shared_by):
                    t = I(own * shared_by + h)
                    bound = 0 if one_row else h
                    if t < n and firsts[bound] < lasts[bound]:
                        head = head_of(I(task0 + t), n_head, head0)
                        partial = I(chunk - (first_visible(places[row_of(I(task0 + t))], window) >> 6))
                        at = advance(sums, (np.int64(head) * partials + partial) * d_pad + 2 * pair)
                        at[0] = total[2 * h]
                        at[1] = total[2 * h + 1]

    @cuda.jit
    def attend_chunks(
        q, new, keys, values, positions, sequences, table, weights, sums, rows, pages, stride, partials, window, scale
    ):
        let_next_begin()
        key_tile = pointer(cuda.shared.array(key_tile_words, np.uint32, ALIGNED))
        value_tile = key_tile
        if apart:
            value_tile = pointer(cuda.shared.array(value_tile_words, np.uint32, ALIGNED))
        scaled = pointer(cuda.shared.array(n_scaled, np.float32, ALIGNED))
        scores = pointer(cuda.shared.array(n_scores, np.float32, ALIGNED))
        if single:
            places = cuda.local.array(1, np.int32)
        else:
            places = pointer(cuda.shared.array(MAX_ROWS, np.int32, ALIGNED))
        key = cuda.local.array(n_key, np.uint32)
        value = cuda.local.array(n_value, np.uint32)
        loaded = cuda.local.array(scaled_rounds, np.float32)
        tops = cuda.local.array(weigh_rounds, np.float32)
        masses = cuda.local.array(weigh_rounds, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (threads - 1))
        head_kv = I(cuda.blockIdx.x & 0xFFFF)
        n_head = I(cuda.gridDim.x * group)
        head0 = I(head_kv * group)
        row, part = I(0), I(cuda.blockIdx.y & 0xFFFF)
        if single:
            row, part = I(U(part) // U(parts)), I(U(part) % U(parts))
            head0 = I(head0 + row * n_head)
        task0 = I(part * tasks)
        n = min(I((group if single else rows * group) - task0), I(tasks))
        if not early:
            wait_for_inputs()
        place = positions[row if single else min(I(thread & 31), I(rows - 1))]
        table = advance(table, I(sequences[row] * stride))
        lowest, highest = place, place
        if not single:
            for k in range(5):
                lowest = min(lowest, lane_xor_int(lowest, I(1 << k)))
                highest = max(highest, lane_xor_int(highest, I(1 << k)))
        of_head = I(head_kv * pages)
        chunk = I((first_visible(lowest, window) >> 6) + cuda.blockIdx.z)
        last_chunk = I(last_visible(highest) >> 6)
        # The first chunk to which a row of the sequence may append; rows of one sequence are consecutive.
        fresh = I((lowest - rows + 1 if single else lowest) >> 6)
        at = np.int64(0)
        if chunk <= last_chunk:
            at = np.int64(I(of_head + table[chunk]))
        if single:
            places[0] = place
        elif thread < 32:
            places[thread] = place
        if single and early and apart and rows > 1 and chunk >= fresh:
            # Only what the row itself appends is added later.
            wait_for_inputs()
        # Chunks before the first new position hold earlier passes; new positions in the others are added later.
        if chunk <= last_chunk and (apart or not early or chunk < fresh):
            fetch(keys, values, at, thread, key, value)
            if apart:
                store_keys(key_tile, thread, key)
                store_values(value_tile, thread, value)
                cuda.syncthreads()
        if early:
            wait_for_inputs()
            if not apart and chunk <= last_chunk and chunk >= fresh:
                fetch(keys, values, at, thread, key, value)
        if chunk <= last_chunk:
            for k in range(scaled_rounds):
                i = I(thread + k * threads)
                t, d = min(I(i // d_k), I(n - 1)), I(i % d_k)
                loaded[k] = q[I(head_of(I(task0 + t), n_head, head0) * d_k) + d]
            if apart and early and chunk >= lowest >> 6:
                width = I(cuda.gridDim.x * (d_k + d_v))
                appended = advance(new, I(row * width + head_kv * (d_k + d_v)))
                if single:
                    amend(appended, key_tile, value_tile, places, chunk, rows, width, thread)
                else:
                    first = I(0)
                    while first < rows:
                        of_first, at_first = advance(appended, I(first * width)), advance(places, first)
                        amend(of_first, key_tile, value_tile, at_first, chunk, I(rows - first), width, thread)
                        first = I(first + AMENDED)
            for k in range(scaled_rounds):
                i = I(thread + k * threads)
                t, d = I(i // d_k), I(i % d_k)
                if scaled_exact or i < n_scaled:
                    scaled[I(t // shared_by * d_k + d) * shared_by + t % shared_by] = loaded[k] * scale
        while chunk <= last_chunk:
            after = I(chunk + cuda.gridDim.z)
            next_at = at
            if after <= last_chunk:
                # Read early: what is there depends on it.
                next_at = np.int64(I(of_head + table[after]))
            chunk_keys, chunk_values = key_tile, value_tile
            if staged and not apart:
                store_keys(key_tile, thread, key)
            if not staged:
                chunk_keys = advance(keys, at * key_words)
                chunk_values = advance(values, at * value_words)
            cuda.syncthreads()
            score(chunk_keys, scaled, scores, thread, n)
            cuda.syncthreads()
            if staged and not apart:
                store_values(value_tile, thread, value)
            if after <= last_chunk:
                fetch(keys, values, next_at, thread, key, value)
            weigh(scores, places, tops, masses, thread, n, task0, window, chunk)
            cuda.syncthreads()
            weighted_sum(chunk_values, scores, places, sums, thread, n, task0, head0, n_head, partials, window, chunk)
            note(places, tops, masses, weights, thread, n, task0, head0, n_head, partials, window, chunk)
            if after <= last_chunk:
                cuda.syncthreads()
                if apart:
                    store_keys(key_tile, thread, key)
                    store_values(value_tile, thread, value)
            chunk, at = after, next_at

    return attend_chunks
