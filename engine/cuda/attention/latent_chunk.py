"""A chunk of 64 latents, of which each is the key and, up to a prefix, the value of all heads: what kernels have of it in
shared memory, and the device functions that multiply queries with keys and weights with values.

A block of 256 threads has some (row, head) pairs, its tasks.  For scores a lane owns two positions, a warp every eighth pair;
for weighted values a thread owns two elements of all pairs.  ``engine/cuda/attention/latent.py`` and
``engine/cuda/compressed_attention.py`` are the kernels.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cuda.attention.attend import MAX_ROWS
from engine.cuda.attention.tile import take4
from engine.cuda.intrinsics import advance, bits_float, fma, keep4, load4, vector2, vector4
from engine.cuda.products.unpack import device, high_half, low_half
from engine.cuda.runtime.compiler import SHARED_OF_DRIVER
from engine.cuda.runtime.kinds import DeviceFunction
from engine.errors import DeviceError

F = np.float32
I = np.int32  # noqa: E741

THREADS = 256
WARPS = THREADS // 32
MOST_TASKS = 32
"""(row, head) pairs of a block."""
RESIDENT = 2
"""The most blocks that should fit on a multiprocessor, so that some load while others compute."""
SHARED_OF_MULTIPROCESSOR = 228 << 10
"""Shared memory that they have together on the GPUs that the kernel is tuned for."""
MOST_SUMS = 16
"""Pairs whose weighted sums a thread computes at once: more would need too many registers."""
AT_ONCE = 4
"""Positions of a weighted sum without a loop."""
HIDDEN = F(-1.0)
"""The weight of a position that a pair does not see."""


@dataclass(frozen=True)
class Layout:
    """What a block has in shared memory, in words: 64 rows of a slice of the elements, queries [tasks, width], scores
    [tasks, 64], weights [64, tasks + 4], then positions of rows; or, if the rows of a chunk are ``listed``, their numbers
    [64] and eight numbers of each pair [8, tasks].

    half: whether elements are float16; slices: the number of runs that the elements of a row are divided into.
    """

    half: bool
    rank: int
    n_rope: int
    tasks: int
    slices: int
    listed: bool = False

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.rank + self.n_rope

    @property
    def words(self) -> int:
        """Words of a slice of a row."""
        return self.width // (2 if self.half else 1) // self.slices

    @property
    def pitch(self) -> int:
        """Words from one row to the next: an odd number of vectors, so that eight lanes that read vectors of different rows
        use every bank."""
        vectors = self.words // 4
        return 4 * (vectors + 1 - vectors % 2)

    @property
    def queries(self) -> int:
        """Where the queries begin."""
        return CHUNK * self.pitch

    @property
    def scores(self) -> int:
        """Where the scores begin."""
        return self.queries + self.tasks * self.width

    @property
    def weights(self) -> int:
        """Where the weights begin."""
        return self.scores + self.tasks * CHUNK

    @property
    def apart(self) -> int:
        """Words from the weights of one position to those of the next."""
        return self.tasks + 4

    @property
    def places(self) -> int:
        """Where the positions, or the numbers of rows, begin."""
        return self.weights + CHUNK * self.apart

    @property
    def summed(self) -> int:
        """Pairs whose weighted sums a thread computes at once: a multiple of 4."""
        return self.tasks // -(-self.tasks // MOST_SUMS)

    @property
    def bytes(self) -> int:
        """The size of all."""
        return 4 * (self.places + (CHUNK + 8 * self.tasks if self.listed else MAX_ROWS))

    @property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor."""
        return max(1, min(RESIDENT, SHARED_OF_MULTIPROCESSOR // (self.bytes + SHARED_OF_DRIVER)))


def layout(
    half: bool,
    rank: int,
    n_rope: int,
    pairs: int,
    shared: int,
    most: int = MOST_TASKS,
    listed: bool = False,
    resident: int = RESIDENT,
) -> Layout:
    """The layout of blocks that may have ``shared`` bytes of shared memory, for ``pairs`` pairs in all: with as many pairs as
    fit, at most ``most``, and the fewest slices of which the most blocks, at most ``resident``, fit on a multiprocessor.
    Raises DeviceError for sizes that the kernels do not support."""
    per = 8 if half else 4
    if (rank + n_rope) % per or rank % 4 or n_rope % 4:
        raise DeviceError(
            f"latent attention on a GPU takes latents of a multiple of 4 and rows of a multiple of {per} elements, not "
            f'{rank} and {rank + n_rope}; use device="cpu".'
        )
    vectors = (rank + n_rope) // per
    for parts in range(-(-pairs // most), pairs + 1):
        tasks = WARPS * -(-pairs // (WARPS * parts))
        layouts = [Layout(half, rank, n_rope, tasks, n, listed) for n in range(1, vectors + 1) if vectors % n == 0]
        fitting = [one for one in layouts if one.bytes <= shared]
        if fitting:
            return max(fitting, key=lambda one: (min(one.resident, resident), -one.slices))
    raise DeviceError(f'latents of {rank} elements do not fit into the GPU\'s shared memory; use device="cpu".')


# --- device functions --------------------------------------------------------------------------------------------------


def make_stage(of: Layout) -> DeviceFunction:
    """The device function ``stage(rows, tile, thread, places)``: copy a slice of 64 rows to the tile.  It begins at ``rows``
    for the first of consecutive rows; if they are listed, for row 0, and the rows are ``places``, int32 [64], as words."""
    vectors, row_words, pitch = of.words // 4, of.words * of.slices, of.pitch
    n = CHUNK * vectors
    rounds, exact = -(-n // THREADS), n % THREADS == 0
    n_words, listed = 4 * min(rounds, 9), of.listed

    def make(first: int, count: int) -> DeviceFunction:
        """Rounds first .. first + count - 1: all loads, then all stores."""

        @device
        def some(rows, tile, thread, places, words):
            for k in range(count):
                i = I(thread + (first + k) * THREADS)
                if exact or i < n:
                    if listed:
                        row = np.int64(I(places[I(i // vectors)])) * row_words
                        vector = load4(advance(rows, row), I(4 * I(i % vectors)))
                    else:
                        vector = load4(rows, I(I(i // vectors) * row_words + 4 * I(i % vectors)))
                    for e in range(4):
                        words[4 * k + e] = vector[e]
            for k in range(count):
                i = I(thread + (first + k) * THREADS)
                if exact or i < n:
                    at = I(I(i // vectors) * pitch + 4 * I(i % vectors))
                    keep4(tile, at, words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3])

        return some

    runs = [make(first, min(9, rounds - first)) for first in range(0, rounds, 9)]

    def chained(runs: list[DeviceFunction]) -> DeviceFunction:
        one = runs[0]
        if len(runs) == 1:
            return one
        rest = chained(runs[1:])

        @device
        def both(rows, tile, thread, places, words):
            one(rows, tile, thread, places, words)
            rest(rows, tile, thread, places, words)

        return both

    copy = chained(runs)

    @device
    def stage(rows, tile, thread, places):
        words = cuda.local.array(n_words, np.uint32)
        copy(rows, tile, thread, places, words)

    return stage


def make_floats(half: bool) -> DeviceFunction:
    """The device function ``floats(words, x, at)``: the elements of a vector of four words, as x[at], x[at + 1], ..."""

    @device
    def floats(words, x, at):
        for e in range(4):
            if half:
                x[at + 2 * e] = low_half(words[e])
                x[at + 2 * e + 1] = high_half(words[e])
            else:
                x[at + e] = bits_float(I(words[e]))

    return floats


def make_score(of: Layout) -> DeviceFunction:
    """The device function ``score(tile, query, lane, total)``: add a slice of the elements to the scores of a warp's pairs
    and the lane's two positions, total [pairs, 2].  query: that of the first pair, from the slice on; the warp has every
    eighth pair."""
    per, pairs = 8 if of.half else 4, of.tasks // WARPS
    vectors, pitch, further = of.words // 4, of.pitch, WARPS * of.width
    n_keys, second = 2 * per, CHUNK // 2 * of.pitch
    floats = make_floats(of.half)

    @device
    def score(tile, query, lane, total):
        keys = cuda.local.array(n_keys, np.float32)
        q = cuda.local.array(per, np.float32)
        row = advance(tile, I(lane * pitch))
        left = I(vectors)
        while left > 0:
            floats(vector4(row, I(0)), keys, 0)
            floats(vector4(row, I(second)), keys, per)
            for t in range(pairs):
                for k in range(per // 4):
                    take4(query, I(t * further + 4 * k), q, 4 * k)
                for e in range(per):
                    total[2 * t] = fma(q[e], keys[e], total[2 * t])
                    total[2 * t + 1] = fma(q[e], keys[per + e], total[2 * t + 1])
            row, query = advance(row, 4), advance(query, per)
            left = I(left - 1)

    return score


def make_sum(of: Layout, masked: bool) -> DeviceFunction:
    """The device function ``add(value, p, total)``: add ``AT_ONCE`` positions to the weighted sums of a thread's two elements
    for ``summed`` pairs, total [pairs, 2].  ``masked``: but those whose weight is ``HIDDEN``."""
    half, summed, pitch, apart = of.half, of.summed, of.pitch, of.apart

    @device
    def add(value, p, total):
        weight = cuda.local.array(4, np.float32)
        for j in range(AT_ONCE):
            if half:
                word = value[j * pitch]
                a, b = low_half(word), high_half(word)
            else:
                both = vector2(value, I(j * pitch))
                a, b = bits_float(I(both[0])), bits_float(I(both[1]))
            for t in range(0, summed, 4):
                take4(p, I(j * apart + t), weight, 0)
                for k in range(4):
                    x = fma(weight[k], a, total[2 * (t + k)])
                    y = fma(weight[k], b, total[2 * (t + k) + 1])
                    if masked:
                        x = total[2 * (t + k)] if weight[k] < F(0.0) else x
                        y = total[2 * (t + k) + 1] if weight[k] < F(0.0) else y
                    total[2 * (t + k)] = x
                    total[2 * (t + k) + 1] = y

    return add
