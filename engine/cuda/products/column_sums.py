"""The integer sums of a unit of 32 weights, for ``columns.py``: how a format's bits become operands of a tensor core.

Formula: dot = sum_k q[k] * x[k].
Shapes: records of ``engine/cuda/products/repack.py``; lane 4 g + t of a warp passes weights of rows g and g + 8, at positions
    4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3 of a unit, or others in another order if the activations have the same.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import njit

from engine.cuda.intrinsics import mma32, mma32_onto, pick_bytes
from engine.cuda.products.lanes import device, table_words
from engine.cuda.products.unpack import unpack
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.grids import FP4_VALUES, IQ4_VALUES

u32 = np.uint32


class ColumnSums(NamedTuple):
    """The integer sums of one format.

    order(x0, x1): what ``dots`` needs of the activations at 4 t .. 4 t + 3 and 16 + 4 t .. 16 + 4 t + 3 of a unit, a tuple.
    dots(words, y): the four sums of ``mma32`` with q + offset, for the lane's words of a record and the ordered activations.
    offset: subtracted by means of the sums of the activations: sum_k q[k] * x[k] = sum_k (q[k] + offset) * x[k] - offset *
        sum_k x[k].
    """

    order: DeviceFunction
    dots: DeviceFunction
    offset: int = 0


def _make_plain(block: DeviceFunction, offset: int) -> ColumnSums:
    @njit
    def order(x0, x1):
        return x0, x1

    @device
    def dots(words, y):
        a = block(words, 0)
        return mma32(a[0], a[1], a[2], a[3], y[0], y[1])

    return ColumnSums(order, dots, offset)


@njit
def _in_turn(x0, x1):
    """The activations in the order of the nibbles of a word: positions p, p + 16, p + 1, p + 17, ..."""
    return pick_bytes(x0, x1, u32(0x5140)), pick_bytes(x0, x1, u32(0x7362))


def _make_looked_up(values: Sequence[int]) -> ColumnSums:
    """Sums of four-bit formats whose q are the entries of a table."""
    t0, t1, t2, t3 = table_words(values)

    @njit
    def entries(q):
        """The entries that the four low and the four high nibbles number."""
        # Both halves of the table are looked up, and bit 3 chooses between them.
        index = u32(q & u32(0x77777777))
        upper = u32(u32(0x32103210) | u32(u32(q & u32(0x88888888)) >> u32(1)))
        other, other_upper = u32(index >> u32(16)), u32(upper >> u32(16))
        return (
            pick_bytes(pick_bytes(t0, t1, index), pick_bytes(t2, t3, index), upper),
            pick_bytes(pick_bytes(t0, t1, other), pick_bytes(t2, t3, other), other_upper),
        )

    @device
    def dots(words, y):
        a, b = entries(words[0]), entries(words[1])
        return mma32(a[0], b[0], a[1], b[1], y[0], y[1])

    return ColumnSums(_in_turn, dots)


def _make_signed(values: Sequence[int]) -> ColumnSums:
    """Sums of four-bit formats whose q are the entries of a table whose second half is the negative of the first.

    Bit 3 of an index of ``pick_bytes`` replicates the sign of the chosen byte, which is 0 in the first half.  So a lookup
    there gives the positive q, and 0 for the others.  With bit 3 inverted it gives the magnitudes of the negative q, which a
    second product multiplies by the negative activations.
    """
    t0, t1, _, _ = table_words(values)
    assert list(values[8:]) == [-value for value in values[:8]] and min(values[:8]) >= 0

    @njit
    def negative(x):
        """Four bytes, each above -128, with the opposite sign."""
        return u32(u32(u32(0x80808080) - u32(x & u32(0x7F7F7F7F))) ^ u32(~x & u32(0x80808080)))

    @njit
    def order(x0, x1):
        y = _in_turn(x0, x1)
        return y[0], y[1], negative(y[0]), negative(y[1])

    @njit
    def positive(q):
        return pick_bytes(t0, t1, q), pick_bytes(t0, t1, u32(q >> u32(16)))

    @device
    def dots(words, y):
        a, b = positive(words[0]), positive(words[1])
        sums = mma32(a[0], b[0], a[1], b[1], y[0], y[1])
        a, b = positive(u32(words[0] ^ u32(0x88888888))), positive(u32(words[1] ^ u32(0x88888888)))
        return mma32_onto(a[0], b[0], a[1], b[1], y[2], y[3], sums[0], sums[1], sums[2], sums[3])

    return ColumnSums(order, dots)


def column_sums(type_: T) -> ColumnSums:
    """The sums of a format, new functions at every call, since Numba keeps what it compiled for one target."""
    if type_ == T.MXFP4:
        return _make_signed(FP4_VALUES)
    if type_ == T.IQ4_NL:
        return _make_looked_up(IQ4_VALUES)
    # Formats with the same q, without an offset.
    unsigned, offset = {T.Q4_0: (T.Q4_1, 8), T.Q5_0: (T.Q5_1, 16)}.get(type_, (type_, 0))
    return _make_plain(unpack(unsigned).block, offset)
