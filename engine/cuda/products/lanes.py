"""How a lane of a warp reads a record, and the pieces that the formats have in common.

Shapes: a record of ``engine/cuda/products/repack.py``; lane 4 g + t of a warp works for rows g and g + 8.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numba import cuda, njit

from engine.cuda.intrinsics import device, half_to_float, pick_bytes, stream1, stream2, stream4
from engine.cuda.runtime.kinds import DeviceFunction

f32 = np.float32
i32 = np.int32
u16 = np.uint16
u32 = np.uint32

Pieces: TypeAlias = tuple[tuple[int, int, str], ...]
"""The parts of a record that a lane reads: (words, offset in words, owner) each."""


@dataclass(frozen=True)
class Unpack:
    """How a lane reads one format.

    group: weights that share a scale (32 or 16; 0: no integer scales).
    offset: what is subtracted from every q by means of the sums of the activations.
    mins: whether the format has minimums.

    pieces: the parts of a record that a lane reads, in this order: (words, offset, owner).  "lane": each lane has its own,
        contiguous with those of the others; "half": lanes t = 0 and 1 of a row share them, and t = 2 and 3; "turn": t = 0 and
        2, and t = 1 and 3; "row": the four lanes of a row share them; "pair": two rows share them; "warp": all lanes share
        them.
    header(words): whatever is decoded once per record, a tuple.
    block(words, j): q of positions 32 j .. 32 j + 31: the four words a0 .. a3 of ``mma32``.  In a format with units of 16, q
        of unit j of the record: the two words of ``mma16``.
    scale(header, r, g): int32 scale of group g of row g (r = 0) or g + 8 (r = 1).
    sums(header, r): four words of 16 bytes (group 16) or two of 8 (group 32): the factors of the sums of the activations,
        which are the minimums, or the scales if there is an offset.
    factors(words): d of the two rows, then dm of the two (0 if the format has none).  ``factors(words, j)``, those of unit j,
        where a record has several units.
    fill(): copies what ``block`` looks up to shared memory; all threads of the block call it, before a barrier.
    table_bytes: the shared memory that this takes.
    """

    group: int
    offset: int
    mins: bool
    pieces: Pieces
    header: DeviceFunction
    block: DeviceFunction
    scale: DeviceFunction
    sums: DeviceFunction
    factors: DeviceFunction
    fill: DeviceFunction | None = None
    table_bytes: int = 0

    @property
    def words(self) -> int:
        """The number of words of a record that a lane reads."""
        return sum(n for n, _, _ in self.pieces)

    def make_fill(self) -> DeviceFunction:
        """The device function fill(): fill the tables of a block, if there are any, and wait for all of its threads."""
        own = self.fill

        @device
        def fill():
            own()
            cuda.syncthreads()

        @device
        def nothing():
            pass

        return fill if own is not None else nothing

    def make_load(self, streams: Mapping[int, DeviceFunction] | None = None) -> DeviceFunction:
        """The device function load(record, lane, words): start loading the lane's words into registers; streams: loads of 1,
        2 and 4 words to use instead of those from memory."""
        return make_load(self.pieces, streams or {1: stream1, 2: stream2, 4: stream4})


def make_load(pieces: Pieces, streams: Mapping[int, DeviceFunction], before: int = 0) -> DeviceFunction:
    """The device function load(record, lane, words): start loading a lane's pieces of a record into registers, after
    ``before`` words of others; streams: loads of 1, 2 and 4 words."""
    return _make_load(pieces, before, {n: _make_move(n, stream) for n, stream in streams.items()})


_SHIFTS = {"lane": 0, "half": 1, "row": 2, "pair": 3, "warp": 5}


def make_place(whose: str) -> DeviceFunction:
    """The device function place(lane): the index of the lane's share of a piece."""
    if whose == "turn":

        @device
        def in_turn(lane):
            return i32(i32(i32(lane >> 2) << 1) | i32(lane & 1))

        return in_turn
    shift = _SHIFTS[whose]

    @device
    def place(lane):
        return lane >> shift

    return place


def _make_move(n: int, stream: DeviceFunction) -> DeviceFunction:
    """The device function move(p, i, words, k): start loading n words from p[i] into words[k]."""

    @device
    def move(p, i, words, k):
        loaded = stream(p, i)
        for e in range(n):
            words[k + e] = loaded[e]

    @device
    def move_one(p, i, words, k):
        words[k] = stream(p, i)

    return move_one if n == 1 else move


def _make_load(pieces: Pieces, before: int, move: Mapping[int, DeviceFunction]) -> DeviceFunction:
    """The device function load(record, lane, words) for pieces of a record, after ``before`` words of others."""
    (n, start, whose), *others = pieces
    of_first, place = move[n], make_place(whose)

    @device
    def load_last(p, lane, words):
        of_first(p, start + n * place(lane), words, before)

    if not others:
        return load_last
    rest = _make_load(tuple(others), before + n, move)

    @device
    def load(p, lane, words):
        of_first(p, start + n * place(lane), words, before)
        rest(p, lane, words)

    return load


# --- small pieces ----------------------------------------------------------------------------------------------


@njit
def low_half(w):
    """The float16 in the low 16 bits of a word."""
    return half_to_float(u16(w & u32(0xFFFF)))


@njit
def high_half(w):
    """The float16 in the high 16 bits of a word."""
    return half_to_float(u16(w >> u32(16)))


@njit
def unsigned_byte(w, k):
    """Byte k of a word."""
    return i32((w >> u32(8 * k)) & u32(255))


@njit
def signed_byte(w, k):
    """Byte k of a word, as int8."""
    return i32(i32(u32(w << u32(24 - 8 * k))) >> i32(24))


@njit
def nibbles(w, shift):
    """Four nibbles, one from each byte."""
    return u32((w >> u32(shift)) & u32(0x0F0F0F0F))


@njit
def minus(w, k):
    """Four bytes below 128, less k each (k as four bytes), as int8: bit 7 is set first, so no byte borrows from the next."""
    return u32(u32((w | u32(0x80808080)) - u32(k)) ^ u32(0x80808080))


@njit
def spread(bits):
    """Move bits 0 .. 3 to the lowest bits of bytes 0 .. 3: the product makes copies 7 bits apart, which do not overlap."""
    return u32(u32((bits & u32(15)) * u32(0x00204081)) & u32(0x01010101))


@njit
def no_header(words):
    return words


@njit
def no_scale(header, r, g):
    return i32(1)


@njit
def no_sums(header, r):
    return u32(0), u32(0), u32(0), u32(0)


@njit
def halves(w):
    """The factors of a format with one float16 per row: both rows' in one word."""
    return low_half(w), high_half(w), f32(0.0), f32(0.0)


def vectors(*starts: int) -> Pieces:
    """Pieces of four words for each lane, at the given offsets."""
    return tuple((4, start, "lane") for start in starts)


def both_rows(start: int) -> Pieces:
    """Pieces of 16 bytes of row g, then of row g + 8."""
    return (4, start, "row"), (4, start + 32, "row")


OFFSET = 128
"""What is added to bytes with a sign that have to be unsigned."""


def with_offset(values: Sequence[int]) -> list[int]:
    """The signed bytes of the unsigned values + ``OFFSET``."""
    return [value % 256 - OFFSET for value in values]


def table_words(values: Sequence[int]) -> tuple[np.uint32, ...]:
    """A table of 16 signed bytes as four words."""
    return tuple(np.array(values, np.int8).view(np.uint32))


def byte_table(values: Sequence[int]) -> tuple[DeviceFunction, DeviceFunction]:
    """Two functions that look nibbles up in a table of 16 signed bytes: the low and the high nibbles of a word."""
    four = make_four(values)

    @njit
    def low(q):
        return pick_bytes(four(q), four(u32(q >> u32(16))), u32(0x6420))

    @njit
    def high(q):
        return pick_bytes(four(q), four(u32(q >> u32(16))), u32(0x7531))

    return low, high


def make_four(values: Sequence[int]) -> DeviceFunction:
    """The device function four(q): the entries of a table of 16 signed bytes that the four lowest nibbles number."""
    t0, t1, t2, t3 = (u32(w) for w in table_words(values))

    @njit
    def four(q):
        # Both halves of the table are looked up, and bit 3 chooses between them.
        index = u32(q & u32(0x7777))
        upper = u32(u32(0x3210) | u32(u32(q & u32(0x8888)) >> u32(1)))
        return pick_bytes(pick_bytes(t0, t1, index), pick_bytes(t2, t3, index), upper)

    return four
