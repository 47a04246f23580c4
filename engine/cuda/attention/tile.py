"""A tile of attention queries: how the threads of a block share it, and what each computes without a loop.

Formula: the pieces of ``engine/cuda/attention/tiled.py``: scores and weighted sums as sums of outer products, from scores to
    weights and their sum, chunks and groups joined, the result divided.
Shapes: a thread's numbers are in registers: scores [own, 8], elements [8, columns] (``Tile``).
Who owns what: of 8 pairs a thread has four adjacent ones and, 16 further, four more; of 8 positions of a chunk four and, 32
    further, four more, or every eighth if keys are quantized.
Reduction order: ``engine/cpu/attention.py``; the tree of 64 as exchanges between the eight lanes that share a pair's chunk.
Bytes moved: 16 of shared memory for every 16 (8 x 8) or 11 (4 x 8) fused multiply-adds of a thread.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CHUNK
from engine.cpu.quantized_cache import UNIT
from engine.cuda.attention.sight import sight
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    fma,
    keep4,
    lane_xor,
    load4,
    sigmoid,
    softcap,
    store4,
    vector4,
)
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

DIMENSIONS = 16
"""Dimensions of queries and keys that are in shared memory at a time."""
HIDDEN = F(-1.0)
"""The weight of a position that a row does not see."""


@dataclass(frozen=True)
class Tile:
    """How the threads of a block share its tile, and the layout of shared memory (float32).

    ``own``: pairs of a thread while it computes scores; ``columns``: elements of a thread in the weighted sum; ``at_once``:
    chunks whose scores are computed at the same time; ``positions``: of values that are in shared memory at a time;
    ``quantized``: keys are, and queries stay in shared memory from beginning to end; ``kept``: the weighted sums of the
    groups so far are in shared memory too.
    """

    d_k: int
    d_v: int
    pairs: int
    own: int
    threads: int
    quantized: bool = False
    kept: bool = False

    @property
    def warps_apart(self) -> int:
        """The number of warps that share the pairs of a chunk for scores."""
        return self.pairs // (4 * self.own)

    @property
    def at_once(self) -> int:
        return self.threads // 32 // self.warps_apart

    @property
    def quads(self) -> int:
        """The number of threads along the elements of a value."""
        return 8 * (self.threads // self.pairs)

    @property
    def columns(self) -> int:
        return 8 if self.d_v > 4 * self.quads else 4

    @property
    def pitch(self) -> int:
        """The distance from one position's value to the next."""
        return self.quads * self.columns

    @property
    def positions(self) -> int:
        return 16 if self.pitch <= 256 else 8

    @property
    def slice(self) -> int:
        """The size of one of the two buffers for queries and keys, or values, that are being copied."""
        of_scores = 0 if self.quantized else DIMENSIONS * (self.pairs + self.at_once * CHUNK)
        return max(of_scores, self.positions * self.pitch)

    @property
    def weights(self) -> int:
        """The offset of the weights [at_once, 64, pairs], which follow two slices."""
        return 2 * self.slice

    @property
    def factors(self) -> int:
        """The offset of maxima and sums, or of the two factors that join a chunk, each [at_once, pairs], and of the sums of
        the groups so far [pairs]."""
        return self.weights + self.at_once * CHUNK * self.pairs

    @property
    def queries(self) -> int:
        """The offset of queries that stay: words [d_k / 4, pairs], scales [d_k / 32, pairs]."""
        return self.factors + (2 * self.at_once + 1) * self.pairs

    @property
    def groups(self) -> int:
        """The offset of the weighted sums of the groups so far, in the order of ``make_groups``."""
        return self.queries + (self.pairs * (self.d_k // 4 + self.d_k // BLOCK) if self.quantized else 0)

    @property
    def size(self) -> int:
        return self.groups + (8 * self.columns * self.threads if self.kept else 0)

    @property
    def turn(self) -> int:
        """Weights of four positions and of the next four have different layouts (``keep_weights``): the first bit that
        differs."""
        return 0 if self.quantized else 8


# --- straight-line pieces --------------------------------------------------------------------------------------


@device
def take4(p, i, x, k):
    """x[k : k + 4] = p[i : i + 4], of shared memory."""
    words = vector4(p, i)
    for e in range(4):
        x[k + e] = bits_float(I(words[e]))


def make_each(n: int, one: DeviceFunction) -> DeviceFunction:
    """The device function that calls one(i, ...), ..., one(i + n - 1, ...) in order, without a loop.

    It calls functions for half as many, so that Numba compiles few functions.  NVVM inlines all calls and folds i, which must
    be a constant.
    """
    if n == 1:
        return one
    further = n // 2
    low = make_each(further, one)
    high = low if n == 2 * further else make_each(n - further, one)

    @device
    def each(i, *arguments):
        low(i, *arguments)
        high(i + further, *arguments)

    return each


def _make_rows(columns: int, masked: bool, n: int) -> DeviceFunction:
    """The device function ``rows(i, x, y, acc)``: acc[i, j] = fma(x[i], y[j], acc[i, j]) for rows i .. i + n - 1 of acc
    [.., columns]; ``masked``: not where x[i] is ``HIDDEN``."""

    @device
    def row(i, x, y, acc):
        weight = x[i]
        for j in range(columns):
            total = fma(weight, y[j], acc[i * columns + j])
            if masked:
                total = acc[i * columns + j] if weight < F(0.0) else total
            acc[i * columns + j] = total

    return make_each(n, row)


def make_steps(
    own: int, columns: int, a_pitch: int, b_pitch: int, b_apart: int, masked: bool, n: int, turns: bool = False
) -> DeviceFunction:
    """The device function ``steps(a, second, b, acc)``: n steps of a sum of outer products acc [own, columns], without a
    loop; n: a power of two.

    a, second: pointers to a thread's rows of the first step, four each (second: if ``own`` is 8), ``a_pitch`` from step to
    step; b: to its columns, four and, ``b_apart`` further, four, ``b_pitch`` from step to step; ``turns``: in every other
    step the second four rows come first.
    """
    if n > 1:
        part = make_steps(own, columns, a_pitch, b_pitch, b_apart, masked, n // 2, turns)
        a_further, b_further = n // 2 * a_pitch, n // 2 * b_pitch
        turned = turns and n == 2

        @device
        def steps(a, second, b, acc):
            part(a, second, b, acc)
            a, second, b = advance(a, a_further), advance(second, a_further), advance(b, b_further)
            if turned:
                part(second, a, b, acc)
            else:
                part(a, second, b, acc)

        return steps

    rows = _make_rows(columns, masked, own)

    @device
    def step(a, second, b, acc):
        x = cuda.local.array(own, np.float32)
        y = cuda.local.array(columns, np.float32)
        take4(a, I(0), x, 0)
        if own == 8:
            take4(second, I(0), x, 4)
        take4(b, I(0), y, 0)
        if columns == 8:
            take4(b, I(b_apart), y, 4)
        rows(0, x, y, acc)

    return step


def make_sum_run(tile: Tile, masked: bool) -> DeviceFunction:
    """The device function ``run(a, of_lane, b, acc)``: add eight positions, beginning at a multiple of 8, to a weighted sum.

    a: the weights of the warp's 32 pairs; ``of_lane``: the offset of the thread's first four among them.
    """
    part = make_steps(8, tile.columns, tile.pairs, tile.pitch, 4 * tile.quads, masked, 4, tile.quantized)
    a_further, b_further, turn = 4 * tile.pairs, 4 * tile.pitch, tile.turn

    @device
    def run(a, of_lane, b, acc):
        part(advance(a, of_lane), advance(a, I(of_lane ^ 16)), b, acc)
        a, b, of_lane = advance(a, a_further), advance(b, b_further), I(of_lane ^ turn)
        part(advance(a, of_lane), advance(a, I(of_lane ^ 16)), b, acc)

    return run


def make_bound(tile: Tile, cap: float) -> DeviceFunction:
    """The device function ``bound(i, s)``, i = 0: replace a thread's scores s [own, 8] by cap tanh(score / cap)."""
    most_score = F(cap)

    @device
    def bound(i, s):
        for e in range(8):
            s[8 * i + e] = softcap(s[8 * i + e], most_score)

    return make_each(tile.own, bound)


def make_weigh(
    tile: Tile, spans: bool = False
) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction]:
    """Four device functions for a thread's part of a chunk's scores, s [own, 8], from its position ``key`` on; i is 0.

    ``hide(i, s, places, key, window, chunk)``: set the scores of positions that a pair does not see to -inf.
    ``weigh(i, s, sums, tops, lane)``: turn scores into weights exp(score - maximum); write the first steps of the tree to
    sums, [own, 4] or, if keys are quantized, [own], and the maxima to tops.
    ``total(sums, masses, lane)``: write the sums of weights, one pair or two per lane, to masses.
    ``mark(i, s, places, key, window, chunk)``: set the weights of positions that a pair does not see to ``HIDDEN``.
    places, tops, masses: pointers to the thread's first pair.  The lanes of a chunk differ in bits 1, 2, 3; lane 2 k has
    positions 4 k .. 4 k + 3 and, 32 further, four.  If keys are quantized they differ in bits 2, 3, 4; lane 4 k has every
    eighth position from k on.
    """
    own, quantized = tile.own, tile.quantized
    first_bit, each = (2, 1) if quantized else (1, 4)
    lanes = 7 << first_bit
    _, _, visible = sight(spans)

    def make_hide(value: np.floating) -> DeviceFunction:
        @device
        def hide(i, s, places, key, window, chunk):
            start = 8 * i
            first, last = visible(places[i if i < 4 else i + 12], window, chunk)
            for e in range(8):
                position = I(key + (8 * e if quantized else e if e < 4 else e + 28))
                if position < first or position >= last:
                    s[start + e] = value

        return hide

    @device
    def weigh(i, s, sums, tops, lane):
        start = 8 * i
        m = s[start]
        for e in range(1, 8):
            m = max(m, s[start + e])
        for k in range(3):
            m = max(m, lane_xor(m, I(1 << (first_bit + k))))
        if lane & lanes == 0:
            tops[i if i < 4 else i + 12] = m
        for e in range(8):
            s[start + e] = exp(s[start + e] - m)
        if quantized:
            low, high = s[start] + s[start + 4], s[start + 1] + s[start + 5]
            low, high = low + (s[start + 2] + s[start + 6]), high + (s[start + 3] + s[start + 7])
            sums[i] = low + high
        else:
            for e in range(4):
                sums[4 * i + e] = s[start + e] + s[start + 4 + e]

    @device
    def halve(sums, lane, bit, n):
        """Of n pairs, a lane keeps half and sends the others to the lane that differs in ``bit``."""
        upper = (lane >> bit) & 1 != 0
        for k in range(each * n // 2):
            low, high = sums[k], sums[each * n // 2 + k]
            given = low if upper else high
            kept = high if upper else low
            sums[k] = kept + lane_xor(given, I(1 << bit))

    @device
    def total(sums, masses, lane):
        halve(sums, lane, first_bit + 2, own)
        halve(sums, lane, first_bit + 1, own // 2)
        if own == 8:
            halve(sums, lane, first_bit, 2)
        else:
            for e in range(each):
                sums[e] = sums[e] + lane_xor(sums[e], I(1 << first_bit))
        mass = sums[0] if quantized else (sums[0] + sums[2]) + (sums[1] + sums[3])
        of_lane = I((lane >> first_bit) & 7)
        if own == 8:
            masses[I((of_lane & 4) * 4 + (of_lane & 3))] = mass
        elif of_lane & 1 == 0:
            masses[I(of_lane >> 1)] = mass

    hide, mark = make_each(own, make_hide(F(-np.inf))), make_each(own, make_hide(HIDDEN))
    return hide, make_each(own, weigh), total, mark


def make_join(tile: Tile) -> DeviceFunction:
    """The device function ``join(i, element, o, factors, shares)``, i = 0: join a chunk's weighted sums o [8, columns] to
    those before it in its group; factors, shares: pointers to the thread's first pair."""
    columns = tile.columns

    @device
    def join(i, element, o, factors, shares):
        start, pair = i * columns, i if i < 4 else i + 12
        a, b = factors[pair], shares[pair]
        for j in range(columns):
            element[start + j] = fma(element[start + j], a, b * o[start + j])

    return make_each(8, join)


@device
def rotate4(a, b, c, d):
    """The thread's four elements of a rotated block (``engine/cpu/quantized_cache.py``): elements 4 k and on of lane 2 k."""
    a, b, c, d = a + b, a - b, c + d, c - d
    a, b, c, d = a + c, b + d, a - c, b - d
    lane = I(cuda.threadIdx.x & 31)
    for k in range(1, 4):
        # (x + y, x - y); the upper lane holds the second result: y, which is its own element, enters with the other sign.
        upper = (lane >> k) & 1 != 0
        a = (-a if upper else a) + lane_xor(a, I(1 << k))
        b = (-b if upper else b) + lane_xor(b, I(1 << k))
        c = (-c if upper else c) + lane_xor(c, I(1 << k))
        d = (-d if upper else d) + lane_xor(d, I(1 << k))
    return a * UNIT, b * UNIT, c * UNIT, d * UNIT


@device
def head_of(task, group, head0, n_head):
    """The number of a (row, head) pair of a KV head among all heads of all rows."""
    row = I(U(task) // U(group))
    return I(I(row * n_head) + I(head0 + I(task - row * group)))


def make_groups(tile: Tile, group: int) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """Three device functions, i = 0, for the weighted sums of the groups so far, 8 * columns of each thread, which are in
    shared memory if ``tile.kept``, else in out.

    ``clear(i, element, groups, out, task, last, head0, n_head, column)``: set them, and element [8, columns], to zero;
    ``join``, with ``factors`` at the end: join the sums of a group, element, to them, and set element to zero; ``load``, with
    the arguments of ``clear``: load them to element.
    groups: a pointer to the thread's first four in shared memory, which are followed by those of the other threads; ``task``:
    the number of the thread's first pair, of 0 .. last, in out; ``column``: its first element there; factors: a pointer to
    the thread's first pair of [2, pairs].  What does not exist is not stored.
    """
    columns, d_v, quads, pairs, further = tile.columns, tile.d_v, tile.quads, tile.pairs, 4 * tile.threads

    @device
    def load_kept(i, k, x, start, groups, out, task, last, head0, n_head, column):
        take4(groups, I(I(i * (columns // 4) + k) * further), x, start)

    @device
    def store_kept(i, k, x, start, groups, out, task, last, head0, n_head, column):
        keep4(groups, I(I(i * (columns // 4) + k) * further), x[start], x[start + 1], x[start + 2], x[start + 3])

    @device
    def load4_of(i, k, x, start, groups, out, task, last, head0, n_head, column):
        own, d = I(task + (i if i < 4 else i + 12)), I(column + 4 * quads * k)
        if own <= last and d < d_v:
            words = load4(out, np.int64(head_of(own, group, head0, n_head)) * d_v + d)
            for e in range(4):
                x[start + e] = bits_float(I(words[e]))

    @device
    def store4_of(i, k, x, start, groups, out, task, last, head0, n_head, column):
        own, d = I(task + (i if i < 4 else i + 12)), I(column + 4 * quads * k)
        if own <= last and d < d_v:
            to = np.int64(head_of(own, group, head0, n_head)) * d_v + d
            store4(out, to, x[start], x[start + 1], x[start + 2], x[start + 3])

    load_four, store_four = (load_kept, store_kept) if tile.kept else (load4_of, store4_of)

    @device
    def clear(i, element, groups, out, task, last, head0, n_head, column):
        for k in range(columns // 4):
            start = i * columns + 4 * k
            for e in range(4):
                element[start + e] = F(0.0)
            store_four(i, k, element, start, groups, out, task, last, head0, n_head, column)

    @device
    def join(i, element, groups, out, task, last, head0, n_head, column, factors):
        pair = i if i < 4 else i + 12
        a, b = factors[pair], factors[pairs + pair]
        x = cuda.local.array(4, np.float32)
        for k in range(columns // 4):
            start = i * columns + 4 * k
            for e in range(4):
                x[e] = F(0.0)
            load_four(i, k, x, 0, groups, out, task, last, head0, n_head, column)
            for e in range(4):
                x[e] = fma(x[e], a, b * element[start + e])
                element[start + e] = F(0.0)
            store_four(i, k, x, 0, groups, out, task, last, head0, n_head, column)

    @device
    def load(i, element, groups, out, task, last, head0, n_head, column):
        for k in range(columns // 4):
            load_four(i, k, element, i * columns + 4 * k, groups, out, task, last, head0, n_head, column)

    return make_each(8, clear), make_each(8, join), make_each(8, load)


def make_finish(tile: Tile, group: int, gated: bool, rotated: bool, sinks: bool) -> DeviceFunction:
    """The device function ``finish(i, element, totals, gate, out, task, last, head0, n_head, column)``, i = 0: multiply
    element [8, columns] by the factors of their pairs, [at_once, pairs] behind the totals, if heads have sinks (``sinks``),
    divide it by the totals, rotate it back if values are quantized (``rotated``), multiply it by the gates,
    and write it to out; ``task``: the number of the thread's first pair, of 0 .. last."""
    columns, d_v, quads, factors = tile.columns, tile.d_v, tile.quads, tile.at_once * tile.pairs

    @device
    def finish(i, element, totals, gate, out, task, last, head0, n_head, column):
        pair = i if i < 4 else i + 12
        own, total = I(task + pair), totals[pair]
        head = head_of(own, group, head0, n_head)
        for k in range(columns // 4):
            d, start = I(column + 4 * quads * k), i * columns + 4 * k
            if sinks:
                for e in range(4):
                    element[start + e] = element[start + e] * totals[factors + pair]
            a, b = element[start] / total, element[start + 1] / total
            c, e = element[start + 2] / total, element[start + 3] / total
            if rotated:
                # All lanes, including those of pairs that do not exist.
                a, b, c, e = rotate4(a, b, c, e)
            if own <= last and d < d_v:
                if gated:
                    words = load4(gate, np.int64(head) * (2 * d_v) + (d_v + d))
                    a, b = a * sigmoid(bits_float(I(words[0]))), b * sigmoid(bits_float(I(words[1])))
                    c, e = c * sigmoid(bits_float(I(words[2]))), e * sigmoid(bits_float(I(words[3])))
                store4(out, np.int64(head) * d_v + d, a, b, c, e)

    return make_each(8, finish)
