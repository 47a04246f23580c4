"""The laws of the atoms, and a simulator in which kernels run as plain Python.

With ``NUMBA_ENABLE_CUDASIM=1`` set before Numba is imported, ``engine/cuda/intrinsics.py`` takes its names from here, and::

    from engine.cuda.runtime.simulator import run
    run(KERNEL(constants), grid, block, [array, array, number])

runs a kernel thread by thread on NumPy arrays, with the same bits as on a GPU.  One thread runs at a time, in order of the
thread number, until it waits for others.  So ``print`` in a kernel or in a function that it calls prints in order, and
``breakpoint()`` stops there.

Numba's own simulator supports blocks and ``syncthreads`` but no warps.  Here the 32 lanes of a warp meet at every exchange:
each deposits its operands and waits; when all 32 have arrived, the law computes the result of each lane, and they continue.

An error that would hang a GPU or give garbage raises an exception that describes it: an index outside an array, a vector
load that is not aligned, lanes that do not reach the exchange where the rest of their warp waits, a thread that ends without
``wait_for_inputs`` or writes before it.  Local and shared arrays are filled with bytes 0xFF (NaN, or -1), because a GPU does
not clear them.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from itertools import pairwise
from operator import index, itemgetter
from typing import Any, Protocol

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet
from numba import cuda, njit, types
from numba.core.dispatcher import Dispatcher
from numba.cuda.core import config
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi
from numba.np.numpy_support import as_dtype

from engine import numerics
from engine.cuda.runtime.kinds import Register

__all__ = [
    "Pointer",
    "advance",
    "announce",
    "awaited",
    "bits_float",
    "copies_commit",
    "copies_wait",
    "copy1",
    "copy4",
    "device",
    "dot2_high",
    "dot2_high_signed",
    "dot2_low",
    "dot2_low_signed",
    "float_bits",
    "float_to_half",
    "fma",
    "fresh4",
    "give_packet",
    "half_to_float",
    "halves",
    "hold",
    "keep4",
    "lane_from",
    "lane_of_four",
    "lane_xor",
    "lane_xor_int",
    "lanes_max",
    "lanes_sum",
    "let_next_begin",
    "load1",
    "load2",
    "load4",
    "load_packet",
    "mma16",
    "mma32",
    "mma32_onto",
    "mma_half",
    "octets",
    "pick_bytes",
    "pointer",
    "prefetch",
    "settled",
    "store4",
    "stream1",
    "stream2",
    "stream4",
    "vector2",
    "vector4",
    "wait_for_inputs",
]

WARP = 32

Law = Callable[[list[Any]], Sequence[Any]]
"""The law of an exchange: it maps the operands of lanes 0 to 31 to their results."""


# --- numbers ---------------------------------------------------------------------------------------------------

Kind = type[Any]
"""A type of NumPy's scalars."""

_INTEGERS = frozenset({int, np.int32, np.uint32, np.int64, np.uint64})
_SMALL = range(-64, 1025)
_MOST_CONSTANTS = 4096


def _conversion(kind: Kind) -> Callable[[Register], Register]:
    """``kind`` as a function that gives the same numbers sooner, and is a dtype like it.

    Kernels write ``np.int32(x)`` around most of what they compute, and NumPy takes several times as long to make a number as
    to add two, also if x has this type already.  Numbers of this type, small integers and constants are not made again.
    """
    integers = np.issubdtype(kind, np.integer)
    signed = not np.issubdtype(kind, np.unsignedinteger)
    small = {k: kind(k) for k in _SMALL if k >= 0 or signed}
    constants: dict[float, Register] = {}

    def convert(x: Register) -> Register:
        given = type(x)
        if given is kind:
            return x
        if given in _INTEGERS:
            known = small.get(x)
            return kind(x) if known is None else known
        if given is float and x and not integers:  # 0.0 and -0.0 would be the same constant
            known = constants.get(x)
            if known is None:
                known = kind(x)
                if len(constants) < _MOST_CONSTANTS:
                    constants[x] = known
            return known
        return kind(x)

    convert.dtype = np.dtype(kind)  # type: ignore[attr-defined]
    return convert


_CONVERSIONS = {
    kind: _conversion(kind) for kind in (np.int32, np.int64, np.uint16, np.uint32, np.uint64, np.float32, np.float64)
}


# --- pointers and wide loads -----------------------------------------------------------------------------------


class Pointer:
    """A pointer: ``p[i]`` is element ``offset + i`` of the contiguous ``array``.  Raises IndexError if there is none.

    ``name`` is the name of the kernel's argument, which other kernels may be using before ``wait_for_inputs``; "" for memory
    of the kernel itself, such as a shared array.
    """

    __slots__ = ("_words", "array", "kind", "name", "offset", "size")

    def __init__(self, array: np.ndarray, offset: int = 0, name: str = "") -> None:
        self.array = array if array.ndim == 1 else array.reshape(-1)
        self.offset, self.name = offset, name
        self.size, self.kind = array.size, array.dtype.type
        self._words = _words_of(self.array) if array.itemsize == 4 else None

    def _place(self, i: Register, n: int = 1) -> int:
        at = self.offset + index(i)
        if at < 0 or at + n > self.size:
            elements = f"elements {at} to {at + n - 1}" if n > 1 else f"element {at}"
            raise IndexError(f"{self.name or 'pointer'}: {elements} of an array of {self.size}")
        return at

    def __getitem__(self, i: Register) -> Register:
        at = self.offset + index(i)
        if at < 0 or at >= self.size:
            self._place(i)
        return self.array[at]

    def __setitem__(self, i: Register, value: Register) -> None:
        at = self.offset + index(i)
        if self.name:
            lane: Any = getcurrent()
            if type(lane) is Lane and not lane.inputs_ready and _launch.strict:
                raise RuntimeError(f"{self.name}: element {at} is written before wait_for_inputs()")
        if at < 0 or at >= self.size:
            self._place(i)
        if type(value) is not self.kind:
            value = np.asarray(value).astype(self.kind)
        self.array[at] = value

    def words(self, i: Register, n: int) -> tuple[Register, ...]:
        """n words of 4 bytes from element i on, whose offset must be a multiple of 4 n bytes.  Raises ValueError if it is
        not."""
        at = self.offset + index(i)
        size = self.array.itemsize
        if at * size % (4 * n):
            raise ValueError(f"{self.name or 'pointer'}: a load of {4 * n} bytes at byte {at * size} is not aligned")
        if size != 4:
            count = max(1, 4 * n // size)
            self._place(i, count)
            return tuple(self.array[at : at + count].view(np.uint32)[:n])
        if at < 0 or at + n > self.size:
            self._place(i, n)
        words: Any = self._words
        if n == 4:
            return words[at], words[at + 1], words[at + 2], words[at + 3]
        return (words[at], words[at + 1]) if n == 2 else (words[at],)


def _words_of(array: np.ndarray) -> np.ndarray:
    """An array as words.  Each thread has pointers of its own to a shared array, so the latest views are kept."""
    known = _views.get(id(array))
    if known is None or known.base is not array:
        known = array.view(np.uint32)
        if known.base is array:
            if len(_views) == _MOST_VIEWS:
                _views.clear()
            _views[id(array)] = known
    return known


_MOST_VIEWS = 64
_views: dict[int, np.ndarray] = {}


def advance(p: Pointer, i: Register) -> Pointer:
    """The pointer to ``p[i]``, which may lie outside the array as long as nothing is read there."""
    moved = _new_pointer(Pointer)
    moved.array, moved.offset, moved.name = p.array, p.offset + index(i), p.name
    moved.size, moved.kind, moved._words = p.size, p.kind, p._words
    return moved


_new_pointer = Pointer.__new__


def settled(x: Register) -> Register:
    """x."""
    return x


def halves(p: Pointer) -> Pointer:
    """The memory from p on as uint16."""
    return Pointer(p.array.view(np.uint16), p.offset * p.array.itemsize // 2, p.name)


def octets(p: Pointer) -> Pointer:
    """The memory from p on as uint8."""
    return Pointer(p.array.view(np.uint8), p.offset * p.array.itemsize, p.name)


def load4(p: Pointer, i: Register) -> tuple[Register, ...]:
    """Four words, uint32."""
    return p.words(i, 4)


def load2(p: Pointer, i: Register) -> tuple[Register, ...]:
    """Two words, uint32."""
    return p.words(i, 2)


def load1(p: Pointer, i: Register) -> Register:
    """One word, uint32."""
    return p.words(i, 1)[0]


stream4, stream2, stream1 = load4, load2, load1

fresh4, awaited = load4, load1


def announce(p: Pointer, i: Register, value: Register) -> None:
    """Store one word."""
    p[i] = value


def load_packet(packets: Pointer, at: Register) -> tuple[Register, ...]:
    """Two words, uint32."""
    return packets.words(2 * int(at), 2)


def give_packet(packets: Pointer, at: Register, value: Register, number: Register) -> None:
    """Store two words."""
    for k, word in enumerate((value, number)):
        packets[2 * int(at) + k] = np.uint32(int(word) & 0xFFFFFFFF)


def prefetch(p: Pointer, i: Register, n_bytes: Register) -> None:
    """Does nothing except check that the memory exists and that both ends are aligned."""
    if (start := (p.offset + int(i)) * p.array.itemsize) % 16 or n_bytes % 16:
        raise ValueError(f"{p.name or 'pointer'}: a prefetch of {n_bytes} bytes at byte {start} is not aligned")
    p._place(i, int(n_bytes) // p.array.itemsize)


def store4(p: Pointer, i: Register, a: Register, b: Register, c: Register, d: Register) -> None:
    """Store four float32 at once."""
    keep4(p, i, *map(np.float32, (a, b, c, d)))


# --- integers --------------------------------------------------------------------------------------------------


vector2, vector4 = load2, load4


def keep4(p: Pointer, i: Register, a: Register, b: Register, c: Register, d: Register) -> None:
    """Store four 32-bit numbers at once."""
    p.words(i, 4)  # aligned, and inside the array
    i, kind = index(i), p.kind
    for k, x in enumerate((a, b, c, d), i):
        p[k] = x if type(x) is kind else np.array([x]).view(kind)[0]


def copy4(to: Pointer, i: Register, p: Pointer, j: Register, there: Register) -> None:
    """Copy four words, immediately: reading them before ``copies_wait`` is not detected here."""
    to.words(i, 4)
    words = p.words(j, 4) if there else (np.uint32(0),) * 4
    target: Any = to._words
    for k, word in enumerate(words, to.offset + index(i)):
        target[k] = word


def copy1(to: Pointer, i: Register, p: Pointer, j: Register, there: Register) -> None:
    """One word."""
    to.words(i, 1)
    target: Any = to._words
    target[to.offset + index(i)] = p.words(j, 1)[0] if there else np.uint32(0)


def copies_commit() -> None:
    """Does nothing: copies are complete at once."""


copies_wait = copies_commit


def _int32(x: Register) -> Register:
    """The low 32 bits of an integer, as int32."""
    return x if type(x) is np.int32 else np.int32((int(x) + 2**31) % 2**32 - 2**31)


def _bytes(x: Register, signed: bool = False) -> list[int]:
    """The four bytes of a word."""
    return list((int(x) & 0xFFFFFFFF).to_bytes(4, "little")) if not signed else [(b ^ 128) - 128 for b in _bytes(x)]


def _dot2(a: Register, b: list[int], c: Register) -> Register:
    low, high = ((half ^ 0x8000) - 0x8000 for half in (int(a) & 0xFFFF, int(a) >> 16 & 0xFFFF))
    return _int32(int(c) + low * b[0] + high * b[1])


def dot2_low(a: Register, b: Register, c: Register) -> Register:
    """c plus the int16 halves of a times the unsigned bytes 0 and 1 of b."""
    return _dot2(a, _bytes(b)[:2], c)


def dot2_high(a: Register, b: Register, c: Register) -> Register:
    """c plus the int16 halves of a times the unsigned bytes 2 and 3 of b."""
    return _dot2(a, _bytes(b)[2:], c)


def dot2_low_signed(a: Register, b: Register, c: Register) -> Register:
    """c plus the int16 halves of a times the signed bytes 0 and 1 of b."""
    return _dot2(a, _bytes(b, signed=True)[:2], c)


def dot2_high_signed(a: Register, b: Register, c: Register) -> Register:
    """c plus the int16 halves of a times the signed bytes 2 and 3 of b."""
    return _dot2(a, _bytes(b, signed=True)[2:], c)


def pick_bytes(a: Register, b: Register, index: Register) -> Register:
    """Nibble k of index selects which of the eight bytes of a and b becomes byte k; its bit 3 replicates that byte's sign."""
    both = _bytes(a) + _bytes(b)
    picked = []
    for k in range(4):
        nibble = int(index) >> 4 * k & 15
        byte = both[nibble & 7]
        picked.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return np.uint32(int.from_bytes(bytes(picked), "little"))


# --- threads ---------------------------------------------------------------------------------------------------


class DivergenceError(RuntimeError):
    """Threads wait for others that will not arrive."""


@dataclass
class LaunchOptions:
    """How blocks are run: ``seed`` shuffles the order of threads; ``strict`` checks the use of ``wait_for_inputs``."""

    seed: int | None = None
    strict: bool = False


_launch = LaunchOptions()


class Lane(greenlet):
    """A thread of the blocks of a launch, with its own stack.  It runs until it waits or ends; then the one ``following``
    continues, and after the last one the block.

    Switching between greenlets is a hundred times as fast as switching between system threads.  To begin and to end one takes
    as long as many switches, so it runs threads of many blocks, one after another.
    """

    __slots__ = ("block", "blockIdx", "following", "given", "inputs_ready", "law", "place", "result", "threadIdx")

    def __init__(self) -> None:
        super().__init__()
        self.law: Law | None = None
        # A greenlet that another one started would begin on top of its stack.
        self.switch()

    def begin(self, block: Any, block_index: Any) -> None:
        """Be a thread of a ``SimulatedBlock``."""
        self.block, self.blockIdx = block, block_index
        self.place = ""  # where it waits, "end" when it has ended
        self.inputs_ready = False

    def wait(self, place: str, given: Register = None) -> None:
        """Let the others run until they have reached ``place``."""
        self.place, self.given, self.law = place, given, None
        self.following.switch()

    def run(self) -> None:
        # Integers wrap and floats overflow silently, as on a GPU.
        with np.errstate(all="ignore"):
            self.parent.switch()
            while True:
                try:
                    self.block.body()
                    if _launch.strict and not self.inputs_ready:
                        raise RuntimeError("a thread ended without wait_for_inputs()")
                except GreenletExit:
                    raise
                except BaseException as error:
                    error.add_note(f"in thread {tuple(self.threadIdx)} of block {tuple(self.blockIdx)}")
                    self.block.error = error
                    self.following = self.parent
                self.place = "end"
                self.following.switch()


class SimulatedBlock(simulator.BlockManager):  # type: ignore[misc]
    """The threads of one block: each runs until it waits, then those that have all reached one place continue, and so on."""

    def run(self, grid_point: tuple[int, ...], *args: Register) -> None:
        self.error: BaseException | None = None
        self.barriers: dict[int, Any] = {}
        self.body = partial(self._f, *args)
        context = simulator._get_kernel_context()
        self.dim, self.shared = context.blockDim, context.shared
        self.shared._allocations.clear()
        try:
            self._run(context.lanes(self._block_dim), grid_point)
        except BaseException:
            context.end(failed=True)
            raise
        if all(k + 1 == n for k, n in zip(grid_point, self._grid_dim, strict=True)):
            context.end(failed=False)

    def _run(self, lanes: list[Lane], grid_point: tuple[int, ...]) -> None:
        warps = [lanes[first : first + WARP] for first in range(0, len(lanes), WARP)]
        place = simulator.Dim3(*grid_point)
        for lane in lanes:
            lane.begin(self, place)
        rng = None if _launch.seed is None else np.random.default_rng([_launch.seed, *grid_point])
        ready = lanes
        linked: list[Lane] = []
        while ready:
            order = ready if rng is None else [ready[k] for k in rng.permutation(len(ready))]
            if order != linked:
                for lane, following in pairwise(order):
                    lane.following = following
                order[-1].following = getcurrent()
                linked = order
            order[0].switch()
            if self.error:
                raise self.error
            ready = self._released(lanes, warps)

    def _released(self, lanes: list[Lane], warps: list[list[Lane]]) -> list[Lane]:
        """The threads that can continue."""
        ready: list[Lane] = []
        for warp in warps:
            law, place = warp[0].law, warp[0].place
            if (
                law
                and len(given := [lane.given for lane in warp if lane.place == place]) == len(warp)
                and place != "end"
            ):
                if len(warp) < WARP:
                    raise DivergenceError(f"{place} needs whole warps, this block has {len(lanes)} threads")
                for lane, result in zip(warp, law(given), strict=True):
                    lane.result = result
                warp[0].law = None
                ready += warp
            elif self.barriers:
                ready += [lane for lane in warp if lane.place == "barrier_wait" and lane.given()]
        if not ready:
            living = [lane for lane in lanes if lane.place != "end"]
            if all(lane.place == "syncthreads" for lane in living):
                return living
            raise DivergenceError(f"block {tuple(living[0].blockIdx)}: " + "; ".join(_report(lanes)))
        return ready


def _report(lanes: list[Lane]) -> Iterator[str]:
    """Messages that say which threads of each warp wait, and where."""
    for first in range(0, len(lanes), WARP):
        warp = lanes[first : first + WARP]
        places: dict[str, list[str]] = {}
        for k, lane in enumerate(warp):
            if k == 0 or warp[k - 1].place != lane.place:
                last = next((j for j in range(k, len(warp)) if warp[j].place != lane.place), len(warp)) - 1
                places.setdefault(lane.place, []).append(str(k) if last == k else f"{k}-{last}")
        words = [f"lanes {', '.join(n)} {'ended' if p == 'end' else f'wait in {p}'}" for p, n in places.items()]
        yield f"warp {first // WARP}: {', '.join(words)}"


# --- exchanges within a warp -----------------------------------------------------------------------------------


def _meet(place: str, given: Register, law: Law) -> Register:
    lane: Any = getcurrent()
    assert type(lane) is Lane, f"{place} is called outside of a kernel"
    lane.place, lane.given, lane.law = place, given, law
    lane.following.switch()
    return lane.result


_xor_sources = [itemgetter(*(k ^ mask for k in range(WARP))) for mask in range(WARP)]


def _xor_law(given: list[Register]) -> Sequence[Register]:
    numbers, masks = zip(*given, strict=True)
    if masks.count(masks[0]) == WARP:
        return _xor_sources[masks[0] & 31](numbers)
    return [numbers[k ^ int(mask) & 31] for k, mask in enumerate(masks)]


def _from_law(given: list[Register]) -> list[Register]:
    return [given[source & 31][0] for _, source in given]


def _four_law(given: list[Register]) -> list[Register]:
    return [given[k & 28 | t & 3][0] for k, (_, t) in enumerate(given)]


def _mma_law(given: list[Register]) -> list[tuple[Register, ...]]:
    """Assemble the fragments (a of rows g, g + 8 for each 16 positions; then b), multiply, and distribute the result."""
    halves = len(given[0]) // 3
    lanes = np.array([[index(word) & 0xFFFFFFFF for word in words] for words in given], np.uint32).view(np.int8)
    lanes = lanes.reshape(8, 4, 3 * halves, 4)  # g, t, register, byte
    a = lanes[:, :, : 2 * halves].reshape(8, 4, halves, 2, 4).transpose(3, 0, 2, 1, 4).reshape(16, 16 * halves)
    b = lanes[:, :, 2 * halves :].transpose(0, 2, 1, 3).reshape(8, 16 * halves)
    return _fragments(a.astype(np.int32) @ b.astype(np.int32).T)


def _fragments(c: np.ndarray) -> list[tuple[Register, ...]]:
    """The elements [g, 2 t], [g, 2 t + 1], [g + 8, 2 t], and [g + 8, 2 t + 1] of a matrix, which lane 4 g + t gets."""
    numbers = list(c.reshape(-1))
    return [places(numbers) for places in _fragment_places]


_fragment_places = [
    itemgetter(*(8 * row + 2 * t + k for row in (g, g + 8) for k in range(2))) for g in range(8) for t in range(4)
]


def mma32(a0: Register, a1: Register, a2: Register, a3: Register, b0: Register, b1: Register) -> Register:
    """16 weight rows times 8 activation rows over 32 positions, int32."""
    return _meet("mma32", (a0, a1, a2, a3, b0, b1), _mma_law)


def mma32_onto(*operands: Register) -> Register:
    """``mma32`` added to int32 sums."""
    products = mma32(*operands[:6])
    return tuple(np.int32(x + c) for x, c in zip(products, operands[6:], strict=True))


def mma16(a0: Register, a1: Register, b0: Register) -> Register:
    """16 weight rows times 8 activation rows over 16 positions, int32."""
    return _meet("mma16", (a0, a1, b0), _mma_law)


def _mma_half_law(given: list[Register]) -> list[tuple[Register, ...]]:
    lanes = np.array([[index(word) & 0xFFFFFFFF for word in words] for words in given], np.uint32).view(np.float16)
    lanes = lanes.reshape(8, 4, 6, 2).astype(np.float64)  # g, t, register, half
    a = lanes[:, :, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
    b = lanes[:, :, 4:].transpose(0, 2, 1, 3).reshape(8, 16)
    return _fragments((a @ b.T + 0.0).astype(np.float32))


def mma_half(a0: Register, a1: Register, a2: Register, a3: Register, b0: Register, b1: Register) -> Register:
    """16 rows times 8 columns over 16 positions of float16, float32."""
    return _meet("mma_half", (a0, a1, a2, a3, b0, b1), _mma_half_law)


def lane_xor(x: Register, lane: Register) -> Register:
    """The float32 x of the lane whose number is that of this lane XOR ``lane``."""
    return _meet("lane_xor", (x if type(x) is np.float32 else np.float32(x), lane), _xor_law)


def lane_xor_int(x: Register, lane: Register) -> Register:
    """The int32 x of the lane whose number is that of this lane XOR ``lane``."""
    return _meet("lane_xor_int", (x if type(x) is np.int32 else _int32(x), lane), _xor_law)


def lane_from(x: Register, lane: Register) -> Register:
    """The float32 x of lane ``lane``."""
    return _meet("lane_from", (np.float32(x), int(lane)), _from_law)


def lane_of_four(x: Register, t: Register) -> Register:
    """The float32 x of lane t of the four lanes 4 g .. 4 g + 3 of this one."""
    return _meet("lane_of_four", (np.float32(x), int(t)), _four_law)


def lanes_max(x: Register) -> Register:
    """The largest int32 x of the warp."""
    return _meet("lanes_max", _int32(x), lambda given: [max(given)] * WARP)


def lanes_sum(x: Register) -> Register:
    """The sum of the int32 x of the warp."""
    return _meet("lanes_sum", _int32(x), lambda given: [_int32(sum(map(int, given)))] * WARP)


def pointer(array: np.ndarray) -> Pointer:
    """The pointer to element 0 of a shared array."""
    return Pointer(array)


def wait_for_inputs() -> None:
    """Kernels run one after another here; this only checks that it is called, and before the first write."""
    lane: Any = getcurrent()
    if type(lane) is Lane:
        lane.inputs_ready = True


def let_next_begin() -> None:
    """Does nothing: the next kernel begins when this one has ended."""


def hold(x: Register, never: Register) -> None:
    """Does nothing: Python computes in the order of the source."""
    if never:
        raise RuntimeError("hold: never is not 0")


# --- the scalar functions --------------------------------------------------------------------------------------


@njit(types.float32(types.float32, types.float32, types.float32))
def fma(a, b, c):
    return numerics.fma(a, b, c)


@njit(types.int32(types.float32))
def float_bits(x):
    return numerics.float_bits(x)


@njit(types.float32(types.int32))
def bits_float(i):
    return numerics.bits_float(i)


@njit(types.float32(types.uint16))
def half_to_float(h):
    return numerics.half_to_float(h)


@njit(types.uint16(types.float32))
def float_to_half(x):
    return numerics.float_to_half(x)


_compiled_call = Dispatcher.__call__
_entries: dict[tuple[Any, ...], tuple[Callable[..., Any], Callable[[Any], Register]]] = {}
_helpers: dict[Register, Callable[..., Any]] = {}
"""Helpers that kernels have called, as Python."""


def _call(self: Register, *args: Register) -> Register:
    """Call an ``@njit`` function from Python.

    Helpers of kernels run as Python, like the kernels.  The scalar functions stay compiled, but return NumPy scalars of the
    declared type: Numba would return Python numbers, which would be added and multiplied in float64.
    """
    inside = type(getcurrent()) is Lane
    if inside and (helper := _helpers.get(self)):
        return helper(*args)
    known = _entries.get((self, *map(type, args)))
    if known:
        entry, declared = known
        return declared(entry(*args))
    module = self.py_func.__module__
    if module in ("engine.numerics", __name__) or (inside and module.startswith("engine.cpu.")):
        value = _compiled_call(self, *args)
        return _declared(_return_type(self, args))(value)
    if not inside:
        return _compiled_call(self, *args)
    _helpers[self] = self.py_func
    return self.py_func(*args)


def _return_type(function: Register, args: tuple[Register, ...]) -> Register:
    """The type of the result that a compiled function has just returned.

    If the types of the arguments determine its signature, it is remembered, so that the next call with such arguments does
    not ask Numba for it.
    """
    overloads = list(function.overloads.values())
    if len(overloads) > 1:
        overloads = [function.overloads[tuple(map(function.typeof_pyval, args))]]
    type_ = overloads[0].signature.return_type
    if all(isinstance(arg, (np.generic, float)) for arg in args):
        _entries[function, *map(type, args)] = overloads[0].entry_point, _declared(type_)
    return type_


@cache
def _declared(type_: Register) -> Callable[[Register], Register]:
    """The function that converts a result of a compiled function to the scalar type of a Numba type."""
    if isinstance(type_, types.BaseTuple):
        makers = [_declared(part) for part in type_]
        return lambda value: tuple(make(part) for make, part in zip(makers, value, strict=True))
    if not isinstance(type_, types.Number):
        return lambda value: value
    kind = as_dtype(type_).type
    return _CONVERSIONS.get(kind, kind)


def _direct(function: Register) -> Register:
    """A compiled function with one signature, as a Python function: to find the signature takes longer than the function, and
    some are called a million times in a test."""
    (overload,) = function.overloads.values()
    entry = overload.entry_point
    # An array makes a number of a result sooner than its type does.  Only one kernel runs at a time.
    box = np.empty(1, as_dtype(overload.signature.return_type))

    def with_one(x: Register) -> Register:
        box[0] = entry(x)
        return box[0]

    def with_three(a: Register, b: Register, c: Register) -> Register:
        box[0] = entry(a, b, c)
        return box[0]

    return wraps(function.py_func)(with_one if len(overload.signature.args) == 1 else with_three)


# --- running ---------------------------------------------------------------------------------------------------


@cache
def _unset(shape: Register, dtype: Register) -> np.ndarray:
    """An array of bytes 0xFF, to be copied."""
    array = np.empty(shape, as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array


class _Local(kernelapi.FakeCUDALocal):  # type: ignore[misc]
    def array(self, shape: Register, dtype: Register, alignment: Register = None) -> np.ndarray:
        return _unset(shape, dtype).copy()


_local = _Local()


class _Shared(kernelapi.FakeCUDAShared):  # type: ignore[misc]
    def array(self, shape: Register, dtype: Register, alignment: Register = None) -> np.ndarray:
        """The block's array for this call in the source; shape 0 is the memory that the launch requested."""
        if isinstance(shape, int) and shape == 0:
            return super().array(shape, np.dtype(as_dtype(dtype) if isinstance(dtype, types.Type) else dtype))
        frame = sys._getframe(1)
        place = (frame.f_code, frame.f_lasti)
        if place not in self._allocations:
            self._allocations[place] = _unset(shape, dtype).copy()
        return self._allocations[place]


_spare: list[Lane] = []
"""Threads of the main thread that have ended."""


class _Module(kernelapi.FakeCUDAModule):  # type: ignore[misc]
    """``cuda`` as kernels see it."""

    def __init__(self, grid_dim: Register, block_dim: Register, dynshared_size: int) -> None:
        super().__init__(grid_dim, block_dim, dynshared_size)
        self._local, self._shared = _local, _Shared(dynshared_size)
        self._lanes: list[Lane] = []

    def lanes(self, block_dim: tuple[int, int, int]) -> list[Lane]:
        """The threads of a block, which are the same for all blocks of the launch."""
        if not self._lanes:
            nx, ny, nz = block_dim
            points = [simulator.Dim3(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
            if threading.current_thread() is threading.main_thread():
                self._lanes, _spare[:] = _spare[: len(points)], _spare[len(points) :]
            self._lanes += [Lane() for _ in range(len(points) - len(self._lanes))]
            for lane, point in zip(self._lanes, points, strict=True):
                lane.threadIdx, lane.parent = point, getcurrent()
        return self._lanes

    def end(self, failed: bool) -> None:
        """Keep the threads for other launches, or end them, also those that wait."""
        for lane in self._lanes:
            lane.block = lane.given = lane.result = None
        if not failed and threading.current_thread() is threading.main_thread():
            _spare.extend(self._lanes)
        else:
            for lane in self._lanes:
                lane.throw()
        self._lanes = []

    @property
    def threadIdx(self) -> Any:
        return getcurrent().threadIdx

    @property
    def blockIdx(self) -> Any:
        return getcurrent().blockIdx

    def syncthreads(self) -> None:
        getcurrent().wait("syncthreads")

    def syncthreads_count(self, value: Any) -> int:
        lane = getcurrent()
        lane.block.block_state[tuple(lane.threadIdx)] = value
        lane.wait("syncthreads")
        count = np.count_nonzero(lane.block.block_state)
        lane.wait("syncthreads")
        return int(count)

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        _meet("syncwarp", None, lambda given: given)


class _Cuda:
    """``cuda`` in the modules of device functions: that of the running launch inside kernels, Numba's own elsewhere."""

    local = _local

    @property
    def threadIdx(self) -> Any:
        return getcurrent().threadIdx

    @property
    def blockIdx(self) -> Any:
        return getcurrent().blockIdx

    @property
    def blockDim(self) -> Any:
        return getcurrent().block.dim

    @property
    def gridDim(self) -> Any:
        return simulator._get_kernel_context().gridDim

    @property
    def shared(self) -> Any:
        return getcurrent().block.shared

    def syncthreads(self) -> None:
        getcurrent().wait("syncthreads")

    def __getattr__(self, name: str) -> Any:
        return getattr(simulator._get_kernel_context() if isinstance(getcurrent(), Lane) else cuda, name)


_cuda = _Cuda()


def device(function: Register) -> Register:
    """The function itself, with the ``cuda`` of the running launch: Numba would replace the name in the module at each call,
    which takes longer than most device functions.  Names of types become those of faster functions."""
    names = function.__globals__
    names.update({name: _SUBSTITUTES[id(value)] for name, value in names.items() if id(value) in _SUBSTITUTES})
    return function


_SUBSTITUTES = {id(cuda): _cuda} | {id(kind): convert for kind, convert in _CONVERSIONS.items()}
"""What :func:`device` replaces, by identity."""


if config.ENABLE_CUDASIM:
    simulator.BlockManager = SimulatedBlock
    simulator.FakeCUDAModule = _Module
    Dispatcher.__call__ = _call  # type: ignore[method-assign, assignment]
    _scalars = (fma, float_bits, bits_float, half_to_float, float_to_half)
    fma, float_bits, bits_float, half_to_float, float_to_half = map(_direct, _scalars)


@contextmanager
def _launching(launch: LaunchOptions) -> Iterator[None]:
    global _launch
    before, _launch = _launch, launch
    try:
        yield
    finally:
        _launch = before


def _argument(type_: Register, value: Register, name: str) -> Register:
    """The value that the kernel gets: a Pointer to the array's own memory, or a NumPy scalar."""
    if not isinstance(type_, types.CPointer):
        return as_dtype(type_).type(value)
    dtype = as_dtype(type_.dtype)
    if value is None:
        return Pointer(np.empty(0, dtype), name=name)
    if isinstance(value, Pointer):
        return value
    if not value.flags.c_contiguous:
        raise ValueError(f"{name}: the array must be contiguous")
    return Pointer(value.reshape(-1).view(dtype), name=name)


class Declared(Protocol):
    """The declaration of a kernel: the Numba types of its arguments."""

    @property
    def arguments(self) -> tuple[Any, ...]: ...


class Runnable(Protocol):
    """A kernel for given constants (``engine/cuda/runtime/compiler.py``)."""

    @property
    def kernel(self) -> Declared: ...
    @property
    def name(self) -> str: ...
    @property
    def shared(self) -> int: ...
    @property
    def function(self) -> Any: ...


def run(
    specialization: Runnable,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Register],
    *,
    seed: int | None = None,
    strict: bool = True,
) -> None:
    """Run a kernel on numbers and on contiguous NumPy arrays of any shape.  It writes arrays in place, and reads them as the
    element type of its pointers, regardless of their dtype.  None is a pointer that is not used.

    ``seed``: run threads in a shuffled order; a kernel whose result depends on it lacks a ``syncthreads``.
    ``strict``: every thread must call ``wait_for_inputs`` before it writes or ends.
    Raises IndexError, ValueError, RuntimeError or DivergenceError for the errors that the module's docstring lists.
    """
    if not config.ENABLE_CUDASIM:
        raise RuntimeError("set NUMBA_ENABLE_CUDASIM=1 before Python starts to run kernels in the simulator")
    declared = specialization.kernel.arguments
    function = specialization.function
    names = list(inspect.signature(function.py_func).parameters)
    if not len(declared) == len(args) == len(names):
        raise TypeError(f"{specialization.name} takes {len(names)} arguments ({len(declared)} types), not {len(args)}")
    values = [_argument(type_, value, name) for type_, value, name in zip(declared, args, names, strict=True)]
    with _launching(LaunchOptions(seed, strict)):
        function[grid, block, 0, specialization.shared](*values)
