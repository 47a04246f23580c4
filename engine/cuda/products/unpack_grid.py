"""Formats whose weights are looked up in a grid: the IQ formats of one, two and three bits.

Formula: weight[i] = (d * d_scale) * scale[i // group] * q[i], q from an entry of the grid (``engine/gguf/grids.py``) and a
    sign, or in the formats of one bit q = 8 * grid + delta, with delta = -1 or 1 for 8 or more weights.
Shapes: a lane needs runs of four positions, so an entry of a grid is one or two words of four bytes.  Grids are kept in
    memory as one word of 16 bits for four positions: four nibbles, each the index of a byte.  ``pick_bytes`` turns them into
    the bytes, so the largest grid takes 8 KiB.  Kernels of few activation rows look up more than they compute, so a block
    copies the grid to shared memory; others read global memory through the L1 cache.  Blocks of warpgroups copy grids of
    whole bytes to shared memory, with 128 added: what they multiply are unsigned bytes.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from llvmlite import ir
from numba import cuda, njit, types
from numba.extending import intrinsic

from engine.cuda.intrinsics import SIMULATED, half_to_float, halves, keep4, load4, pick_bytes, pointer
from engine.cuda.products.lanes import (
    OFFSET,
    Pieces,
    Unpack,
    both_rows,
    device,
    high_half,
    low_half,
    nibbles,
    no_header,
    no_sums,
    spread,
    unsigned_byte,
    vectors,
    with_offset,
)
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.grids import IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID
from engine.gguf.quants import FORMATS as ENTRIES

f32 = np.float32
i32 = np.int32
u16 = np.uint16
u32 = np.uint32

GLOBAL, SHARED = 1, 3
"""The address spaces of global and of shared memory."""

MOST_WORDS = 2048
"""Words of the largest table."""


# --- grids -----------------------------------------------------------------------------------------------------


def packed(grid: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """A grid as words of four nibbles, uint16 [n / 4], and the values that they number, at most eight."""
    values, codes = np.unique(grid, return_inverse=True)
    words = codes.reshape(-1, 4) << np.array([0, 4, 8, 12])
    return words.sum(1).astype(np.uint16), values.tolist()


def _bytes(values: list[int]) -> tuple[np.uint32, np.uint32]:
    """Up to eight bytes, as the words from which ``pick_bytes`` picks."""
    low, high = np.array([*values, *[0] * (8 - len(values))], np.int8).view(np.uint32)
    return u32(low), u32(high)


@dataclass(frozen=True)
class Table:
    """A table of uint16 or uint32 with some of these words per entry.

    words(i, k): word k of entry i, as uint32; k is the same in all look-ups of a lane.
    fill(): copies the table to shared memory, by all threads of a block, before a barrier and the first look-up; None if
    look-ups read global memory.
    bytes: the shared memory that it takes.
    """

    words: DeviceFunction
    fill: DeviceFunction | None
    bytes: int


def _make_table(name: str, table: np.ndarray, each: int, near: bool) -> Table:
    """A table of ``each`` words per entry, in global memory, and, if ``near``, in shared memory: there the look-ups of a
    warp, which are at 32 different places, meet only few conflicts."""
    words = table.view(np.uint32)
    kind, size = ir.ArrayType(ir.IntType(32), len(words)), table.itemsize
    source = _Variable(name, GLOBAL, ir.Constant(kind, words.tolist()))
    if not near:
        return Table(_simulated_words(table, each) if SIMULATED else source.make_words(each, size), None, 0)
    copy = _Variable(name, SHARED, ir.Constant(kind, ir.Undefined))
    vectors, is_whole = len(words) // 4, size == 4

    @device
    def array():
        # The simulator has one array for all calls from here, so it must be large enough for any table.
        return pointer(cuda.shared.array(MOST_WORDS, np.uint32, 16))

    @device
    def simulated_source():
        return pointer(words)

    @device
    def simulated_words(i, k):
        own = array() if is_whole else halves(array())
        return u32(own[each * int(i) + int(k)])

    start = simulated_source if SIMULATED else source.make_pointer()
    place = array if SIMULATED else copy.make_pointer()

    @device
    def fill():
        p, to = start(), place()
        i = i32(cuda.threadIdx.x)
        while i < vectors:
            v = load4(p, 4 * i)
            keep4(to, 4 * i, v[0], v[1], v[2], v[3])
            i = i32(i + cuda.blockDim.x)

    return Table(simulated_words if SIMULATED else copy.make_words(each, size), fill, words.nbytes)


def _simulated_words(table: np.ndarray, each: int) -> DeviceFunction:
    @device
    def words(i, k):
        return u32(table[each * int(i) + int(k)])

    return words


@dataclass(frozen=True)
class _Variable:
    """An array of words in an address space, with a name and its contents."""

    name: str
    space: int
    contents: ir.Constant

    def _define(self, module: ir.Module) -> ir.GlobalVariable:
        own = f"bitmirror_{self.name}_{self.space}"
        if own in module.globals:
            return module.globals[own]
        made = ir.GlobalVariable(module, self.contents.type, own, self.space)
        # Functions that use it are compiled one by one, and each brings it along.
        made.linkage, made.initializer, made.align = "linkonce_odr", self.contents, 16
        made.global_constant = self.space == GLOBAL
        return made

    def make_pointer(self) -> DeviceFunction:
        """The device function pointer(): the pointer to word 0."""
        to = types.CPointer(types.uint32)

        @intrinsic
        def pointer(typingctx):
            def codegen(context, builder, sig, args):
                zero = ir.Constant(ir.IntType(64), 0)
                first = builder.gep(self._define(builder.module), [zero, zero])
                return builder.addrspacecast(first, context.get_value_type(to))

            return to(), codegen

        return pointer

    def make_words(self, each: int, size: int) -> DeviceFunction:
        """``Table.words``, of ``size`` bytes."""
        shared, own = self.space == SHARED, ir.IntType(8 * size)
        pointer = own.as_pointer(self.space)

        def extended(builder: ir.IRBuilder, word: ir.Value, to: ir.Type) -> ir.Value:
            return word if own == to else builder.zext(word, to)

        @intrinsic
        def words(typingctx, i, k):
            def codegen(context, builder, sig, args):
                variable, (i, k) = self._define(builder.module), args
                if not shared:
                    index = builder.zext(builder.add(builder.mul(i, i.type(each)), k), ir.IntType(64))
                    word = builder.load(builder.gep(builder.bitcast(variable, pointer), [index]), align=size)
                    word.set_metadata("invariant.load", builder.module.add_metadata([]))
                    return extended(builder, word, i.type)
                start = builder.add(builder.ptrtoint(variable, i.type), builder.mul(k, i.type(size)))
                # Behind this instruction, LLVM cannot see that k is part of the address, and computes the rest of it once
                # instead of the index of a word each time.
                hidden = ir.InlineAsm(ir.FunctionType(i.type, [i.type]), "mov.b32 $0, $1;", "=r,r")
                place = builder.add(builder.call(hidden, [start]), builder.mul(i, i.type(size * each)))
                return extended(builder, builder.load(builder.inttoptr(place, pointer), align=size), i.type)

            return types.uint32(types.uint32, types.uint32), codegen

        return words


def _make_look(name: str, grid: np.ndarray, each: int, near: bool, unsigned: bool) -> tuple[DeviceFunction, Table]:
    """The device function look(i, k, signs): the four bytes k of entry i of a grid, of ``each`` times four, negative where
    those of the 8 signs are set that are for the lane's positions; unsigned: 128 more.  And its
    ``Table``."""
    if unsigned:
        return _make_look_unsigned(name, grid, each)
    words, values = packed(grid)
    table = _make_table(name, words, each, near)
    (low, high), (low_negative, high_negative) = _bytes(values), _bytes([-value for value in values])
    word_of = table.words

    @device
    def look_near(i, k, signs):
        minus = negative(signs)
        word = word_of(u32(i), u32(k))
        return u32((pick_bytes(low, high, word) & ~minus) | (pick_bytes(low_negative, high_negative, word) & minus))

    @device
    def look_far(i, k, signs):
        # More instructions, but kernels of many rows have no registers left for another table.
        ones = spread(u32(signs >> u32(u32(4) * _half())))
        # -x is ~x + 1, and no byte is 0, so none carries into the next.
        return u32(u32(pick_bytes(low, high, word_of(u32(i), u32(k))) ^ u32(ones * u32(255))) + ones)

    return look_near if near else look_far, table


def _make_look_unsigned(name: str, grid: np.ndarray, each: int) -> tuple[DeviceFunction, Table]:
    """``_make_look`` with 128 more, from whole bytes in shared memory."""
    words = (grid.reshape(-1, 4) + 128).astype(np.uint8).view(np.uint32)[:, 0]
    table = _make_table(f"{name}_bytes", words, each, True)
    word_of = table.words

    @device
    def look(i, k, signs):
        minus = negative(signs)
        # 128 - x is ~(128 + x) + 1, and no byte carries into the next.
        return u32(u32(word_of(u32(i), u32(k)) ^ minus) + u32(minus & u32(0x01010101)))

    return look, table


@device
def _half():
    """Which half of a group of 8 the lane's positions are."""
    return u32(cuda.threadIdx.x & 1)


@device
def negative(signs):
    """255 for each of the lane's four positions whose bit is set, from the 8 bits of its group; higher bits do not matter."""
    shift = u32(u32(4) * _half())
    own = u32(signs & u32(u32(15) << shift))
    # The product moves the four bits to the tops of the bytes: copies are 7 bits apart, so they do not overlap.
    return pick_bytes(u32(own * u32(u32(0x10204080) >> shift)), u32(0), u32(0xBA98))


@device
def eight_signs(signs):
    """Seven signs, and the eighth, which makes their parity even; higher bits are arbitrary."""
    return u32(signs + u32(u32(cuda.popc(signs)) << u32(7)))


@njit
def odd(bits):
    """The scale that a few bits stand for."""
    return i32(i32(2) * i32(bits) + i32(1))


def _make_factors(type_: T, at: int) -> DeviceFunction:
    """``Unpack.factors`` of a format whose float16 of both rows are word ``at``."""
    factor = f32(ENTRIES[type_].d_scale)

    @njit
    def factors(w):
        return low_half(w[at]) * factor, high_half(w[at]) * factor, f32(0.0), f32(0.0)

    return factors


def _of_table(
    group: int,
    unsigned: bool,
    pieces: Pieces,
    header: DeviceFunction,
    block: DeviceFunction,
    scale: DeviceFunction,
    factors: DeviceFunction,
    table: Table,
) -> Unpack:
    """The ``Unpack`` of a format of this file, whose ``block`` looks weights up in a table."""
    offset = OFFSET * unsigned
    return Unpack(group, offset, False, pieces, header, block, scale, no_sums, factors, table.fill, table.bytes)


# --- two bits --------------------------------------------------------------------------------------------------


def _iq2_xxs(near: bool, unsigned: bool) -> Unpack:
    """Words: for each pair of blocks, of row g and of row g + 8, twice four grid indices and a word of signs and
    scale; then d."""
    look, table = _make_look("iq2_xxs_grid", IQ2_XXS_GRID, 2, near, unsigned)

    @device
    def signed(index, word, group):
        """Four weights of a group of 8: the lane's half of its grid entry, with its signs."""
        entry = u32(u32(index >> u32(u32(8) * group)) & u32(255))
        signs = eight_signs(u32(u32(word >> u32(u32(7) * group)) & u32(127)))
        return look(entry, _half(), signs)

    @device
    def block(w, j):
        first = u32((cuda.threadIdx.x >> 1) & 1)
        second = u32(first + u32(2))
        k = 8 * (j // 2) + 2 * (j % 2)
        return (
            signed(w[k], w[k + 1], first),
            signed(w[k + 4], w[k + 5], first),
            signed(w[k], w[k + 1], second),
            signed(w[k + 4], w[k + 5], second),
        )

    @njit
    def scale(w, r, g):
        return odd(w[8 * (g // 2) + 4 * r + 2 * (g % 2) + 1] >> u32(28))

    pieces = (*both_rows(0), *both_rows(64), *both_rows(128), *both_rows(192), (1, 256, "row"))
    return _of_table(32, unsigned, pieces, no_header, block, scale, _make_factors(T.IQ2_XXS, 32), table)


def _halves_of_blocks(*starts: int) -> tuple[tuple[int, int, str], ...]:
    """Pieces of four words for each half of a row's lanes, at the given offsets."""
    return tuple((4, start, "half") for start in starts)


def _make_nibble_scales(at: int, row: int) -> tuple[DeviceFunction, DeviceFunction]:
    """``Unpack.header`` and ``Unpack.scale`` of a nibble for each 16 weights, two words from ``at`` for row g and ``row``
    words later for row g + 8: a header has a byte for each scale, those of even groups before those of odd ones."""

    @njit
    def four(w, shift):
        return u32(u32(u32(nibbles(w, shift)) << u32(1)) | u32(0x01010101))

    @njit
    def header(w):
        return (
            *(four(w[at], 0), four(w[at], 4), four(w[at + 1], 0), four(w[at + 1], 4)),
            *(four(w[at + row], 0), four(w[at + row], 4), four(w[at + row + 1], 0), four(w[at + row + 1], 4)),
        )

    @njit
    def scale(h, r, g):
        return unsigned_byte(h[4 * r + 2 * (g // 8) + g % 2], g // 2 % 4)

    return header, scale


def _iq2_xs(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the entries (9 bits) and signs (7 bits) of the lane's groups of 8: of rows g and g + 8 the
    first, then the second; two words of scales of each row; d."""
    look, table = _make_look("iq2_xs_grid", IQ2_XS_GRID, 2, near, unsigned)

    @device
    def signed(word, shift):
        entry = u32(u32(word >> u32(shift)) & u32(511))
        signs = eight_signs(u32(u32(word >> u32(shift + 9)) & u32(127)))
        return look(entry, _half(), signs)

    @device
    def block(w, j):
        return signed(w[2 * j], 0), signed(w[2 * j], 16), signed(w[2 * j + 1], 0), signed(w[2 * j + 1], 16)

    pieces = (*_halves_of_blocks(0, 64, 128, 192), (4, 256, "row"), (1, 288, "row"))
    (header, scale), factors = _make_nibble_scales(16, 2), _make_factors(T.IQ2_XS, 20)
    return _of_table(16, unsigned, pieces, header, block, scale, factors, table)


def _iq2_s(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the low 8 bits of the entries of the lane's groups of 8, of rows g and g + 8 the first, then the
    second, and the signs in this order; of each row two words of the high bits of entries and two of scales; d."""
    look, table = _make_look("iq2_s_grid", IQ2_S_GRID, 2, near, unsigned)

    @device
    def signed(low, signs, high, at, k, group):
        """Byte ``at`` of the words of a group; high: the high bits of all groups of four blocks."""
        top = u32(u32(high >> u32(u32(8 * k) + u32(u32(2) * group))) & u32(3))
        entry = u32(u32(u32(low >> u32(8 * at)) & u32(255)) | u32(top << u32(8)))
        return look(entry, _half(), u32(signs >> u32(8 * at)))

    @device
    def block(w, j):
        first = u32((cuda.threadIdx.x >> 1) & 1)
        second = u32(first + u32(2))
        low, signs, high, high8 = w[2 * j], w[2 * j + 1], w[16 + j // 4], w[20 + j // 4]
        return (
            signed(low, signs, high, 0, j % 4, first),
            signed(low, signs, high8, 1, j % 4, first),
            signed(low, signs, high, 2, j % 4, second),
            signed(low, signs, high8, 3, j % 4, second),
        )

    pieces = (*_halves_of_blocks(0, 64, 128, 192), *both_rows(256), (1, 320, "row"))
    (header, scale), factors = _make_nibble_scales(18, 4), _make_factors(T.IQ2_S, 24)
    return _of_table(16, unsigned, pieces, header, block, scale, factors, table)


# --- three bits ------------------------------------------------------------------------------------------------


def _iq3_xxs(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the entries of the lane's four positions of a0 .. a3; of each row eight words of signs and
    scale; d."""
    look, table = _make_look("iq3_xxs_grid", IQ3_XXS_GRID, 1, near, unsigned)

    @device
    def signed(entries, at, word, group):
        signs = eight_signs(u32(u32(word >> u32(u32(7) * group)) & u32(127)))
        return look(u32(u32(entries >> u32(8 * at)) & u32(255)), 0, signs)

    @device
    def block(w, j):
        first = u32((cuda.threadIdx.x >> 1) & 1)
        second = u32(first + u32(2))
        k = 8 + 8 * (j // 4) + j % 4
        word, word8 = w[k], w[k + 4]
        return (
            signed(w[j], 0, word, first),
            signed(w[j], 1, word8, first),
            signed(w[j], 2, word, second),
            signed(w[j], 3, word8, second),
        )

    @njit
    def scale(w, r, g):
        return odd(w[8 + 8 * (g // 4) + 4 * r + g % 4] >> u32(28))

    pieces = (*vectors(0, 128), *both_rows(256), *both_rows(320), (1, 384, "row"))
    return _of_table(32, unsigned, pieces, no_header, block, scale, _make_factors(T.IQ3_XXS, 24), table)


def _iq3_s(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the low 8 bits of the entries of the lane's four positions of a0 .. a3; for each block, the
    signs of its groups of 8, in this order; of each row two words of the ninth bits of entries; a word of scales of each
    row; d."""
    look, table = _make_look("iq3_s_grid", IQ3_S_GRID, 1, near, unsigned)

    @device
    def signed(entries, signs, high, at, bit):
        ninth = u32(u32(u32(high >> u32(bit)) & u32(1)) << u32(8))
        entry = u32(u32(u32(entries >> u32(8 * at)) & u32(255)) | ninth)
        return look(entry, 0, u32(signs >> u32(8 * at)))

    @device
    def block(w, j):
        bit = u32(u32(8 * (j % 4)) + u32(cuda.threadIdx.x & 3))
        entries, signs, high, high8 = w[j], w[8 + j], w[16 + j // 4], w[18 + j // 4]
        return (
            signed(entries, signs, high, 0, bit),
            signed(entries, signs, high8, 1, bit),
            signed(entries, signs, high, 2, u32(bit + u32(4))),
            signed(entries, signs, high8, 3, u32(bit + u32(4))),
        )

    @njit
    def scale(w, r, g):
        return odd((w[20 + r] >> u32(4 * g)) & u32(15))

    pieces = (*vectors(0, 128), *_halves_of_blocks(256, 320), (4, 384, "row"), (2, 416, "row"), (1, 432, "row"))
    return _of_table(32, unsigned, pieces, no_header, block, scale, _make_factors(T.IQ3_S, 22), table)


# --- one bit ---------------------------------------------------------------------------------------------------

_BELOW, _ABOVE = [-9, -1, 7], [-7, 1, 9]
"""8 * grid + delta for grid = -1, 0 and 1."""


def _make_ternary(near: bool, unsigned: bool) -> tuple[DeviceFunction, Table]:
    """The device function ternary(low, high, below): four weights of the lane's half of a grid entry, which has 8 low bits
    and 3 high ones; below: whether delta is -1; unsigned: 128 more.  And its ``Table``."""
    packed_words, values = packed(IQ1_GRID)
    assert values == [-1, 0, 1]
    table = _make_table("iq1_grid", packed_words, 2, near)
    minus_one, plus_one = (_bytes(with_offset(own) if unsigned else own)[0] for own in (_BELOW, _ABOVE))
    words = table.words

    @device
    def ternary(low, high, below):
        entry = u32(u32(low & u32(255)) | u32(u32(high & u32(7)) << u32(8)))
        values = minus_one if below & u32(1) else plus_one
        return pick_bytes(values, u32(0), words(entry, _half()))

    return ternary, table


def _iq1_s(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the low 8 bits of the entries of the lane's groups of 8, of rows g and g + 8 the first, then the
    second; of each row eight half-words of high bits, scale and sign of delta; d."""
    ternary, table = _make_ternary(near, unsigned)

    @device
    def weights(low, at, word, shift, group):
        own = u32(word >> u32(shift))
        high = u32(own >> u32(u32(3) * group))
        return ternary(u32(low >> u32(8 * at)), high, u32(own >> u32(15)))

    @device
    def block(w, j):
        first = u32((cuda.threadIdx.x >> 1) & 1)
        second = u32(first + u32(2))
        k, shift = 8 + j // 2, 16 * (j % 2)
        return (
            weights(w[j], 0, w[k], shift, first),
            weights(w[j], 1, w[k + 4], shift, first),
            weights(w[j], 2, w[k], shift, second),
            weights(w[j], 3, w[k + 4], shift, second),
        )

    @njit
    def scale(w, r, g):
        return odd((w[8 + 4 * r + g // 2] >> u32(12 + 16 * (g % 2))) & u32(7))

    pieces = (*_halves_of_blocks(0, 64), *both_rows(128), (1, 192, "row"))
    return _of_table(32, unsigned, pieces, no_header, block, scale, _make_factors(T.IQ1_S, 16), table)


def _iq1_m(near: bool, unsigned: bool) -> Unpack:
    """Words: for each block, the low 8 bits of the entries of the lane's groups of 8, of rows g and g + 8 the first, then the
    second; of each row 16 bytes, two nibbles of high bits and sign of delta each; of each row two words of 3-bit scales and,
    at the top of each half-word, a nibble of d."""
    (ternary, table), factor = _make_ternary(near, unsigned), f32(ENTRIES[T.IQ1_M].d_scale)

    @device
    def weights(low, at, word, shift):
        own = u32(word >> u32(shift))
        return ternary(u32(low >> u32(8 * at)), own, u32(own >> u32(3)))

    @device
    def block(w, j):
        first = u32(u32(16 * (j % 2)) + u32(u32(4) * u32((cuda.threadIdx.x >> 1) & 1)))
        second = u32(first + u32(8))
        k = 8 + j // 2
        return (
            weights(w[j], 0, w[k], first),
            weights(w[j], 1, w[k + 4], first),
            weights(w[j], 2, w[k], second),
            weights(w[j], 3, w[k + 4], second),
        )

    @njit
    def scale(w, r, g):
        word = w[16 + 2 * r + g // 8]
        return odd((word >> u32(16 * (g // 4 % 2) + 3 * (g % 4))) & u32(7))

    @njit
    def d(low, high):
        bits = u32(
            u32(u32(low >> u32(12)) & u32(0xF))
            | u32(u32(low >> u32(24)) & u32(0xF0))
            | u32(u32(high >> u32(4)) & u32(0xF00))
            | u32(u32(high >> u32(16)) & u32(0xF000))
        )
        return half_to_float(u16(bits)) * factor

    @njit
    def factors(w):
        return d(w[16], w[17]), d(w[18], w[19]), f32(0.0), f32(0.0)

    pieces = (*_halves_of_blocks(0, 64), *both_rows(128), (4, 192, "row"))
    return _of_table(16, unsigned, pieces, no_header, block, scale, factors, table)


FORMATS: dict[T, Callable[[bool, bool], Unpack]] = {
    T.IQ2_XXS: _iq2_xxs,
    T.IQ2_XS: _iq2_xs,
    T.IQ2_S: _iq2_s,
    T.IQ3_XXS: _iq3_xxs,
    T.IQ3_S: _iq3_s,
    T.IQ1_S: _iq1_s,
    T.IQ1_M: _iq1_m,
}
"""What :func:`engine.cuda.products.unpack.unpack` calls for the formats of this file, with its ``near`` and
``unsigned``."""
