"""Element types of a key-value cache, and the memory layout of the quantized types.

f32 and f16 are float32 and float16.  q8_0 and q4_0 are the block formats with these names: 32 elements of a head share a
float16 scale and have 8 or 4 bits each.  A chunk of 64 positions of one head is a run of words, first the integers, then the
scales:

- keys: 16 (q8_0) or 32 (q4_0) dimensions of a position are four adjacent words, [d_k / 16 or / 32][64][4]; scales
  [d_k / 32][64];
- values: the words of a position are adjacent, [64][d_v / 4 or / 8]; scales [64][d_v / 32].

A word of q8_0 contains four integers of 8 bits, the first in the lowest byte.  A word of q4_0 contains eight integers of 4
bits, with 8 added to each: the low halves of its bytes are elements 0 to 3, the high halves are elements 4 to 7.

i8 and i12 are integers whose products attention adds as integers (``engine/cpu/integer_attention.py``).  The number of
elements that share a float16 scale is the largest power of two that divides the size of a head, but at most 128.  An integer
of i12 is 16 h + l, where h has 8 bits, and l has 4 bits and no sign.  A chunk of one head is a run of words, first the bytes
(i8) or all h (i12), then all l, then the scales:

- keys: a word contains four dimensions of a position, [d_k / 4][64]; in the words of l, the low halves of the bytes are
  dimensions 8 i to 8 i + 3, and the high halves are dimensions 8 i + 4 to 8 i + 7, [d_k / 8][64];
- values: a word contains four positions of a dimension, [16][d_v]; in the words of l, the halves of a byte are dimensions i
  and i + B / 2 of a block of B, [16][d_v / 2], so that no two positions share a byte;
- scales of keys and of values: [blocks][64].
"""

from dataclasses import dataclass

import numpy as np

from engine.checks import described
from engine.errors import UsageError

CHUNK = 64
"""The number of positions in a chunk."""

BLOCK = 32
"""The number of elements that share a scale in q8_0 and q4_0, and the minimum of that number in i8 and i12."""

MOST_BLOCK = 128
"""The maximum number of elements that share a scale in i8 and i12."""

GROUP = 8
"""The number of chunks in a group.  Attention joins the results of the chunks of a group, then the results of groups."""


@dataclass(frozen=True)
class CacheType:
    """An element type of a cache.

    name: the name that users give.
    bits: the size of an element in bits, not counting scales.
    whole: whether attention adds products of elements as integers.
    """

    name: str
    bits: int
    whole: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the elements are integers with a scale per block."""
        return self.bits < 16

    @property
    def most(self) -> int:
        """The largest magnitude of an integer."""
        return (1 << (self.bits - 1)) - 1

    def block(self, d: int) -> int:
        """The number of elements that share a scale in a head of d elements; 0 if d cannot be divided into blocks."""
        block = min(d & -d, MOST_BLOCK) if self.whole else BLOCK
        return block if block >= BLOCK and d % block == 0 else 0

    def row_bytes(self, d: int) -> int:
        """The size in bytes of a key or value of d elements, including scales."""
        return d * self.bits // 8 + (2 * d // self.block(d) if self.quantized else 0)

    def integer_words(self, d: int) -> int:
        """The number of words in a chunk of one head, without scales."""
        return CHUNK * d * self.bits // 32

    def chunk_words(self, d: int) -> int:
        """The number of words in a chunk of one head, including scales."""
        return CHUNK * self.row_bytes(d) // 4

    @property
    def dtype(self) -> type:
        """The dtype of the array: float32, uint16 for the bits of float16, or uint32 for words."""
        return np.uint32 if self.quantized else np.uint16 if self.bits == 16 else np.float32

    def shape(self, heads: int, chunks: int, *chunk: int) -> tuple[int, ...]:
        """The shape of the array of a layer.  chunk: the shape of a chunk of one head; a chunk of a quantized type is stored
        as a run of words instead."""
        if self.quantized:
            return heads, chunks, self.chunk_words(chunk[0] * chunk[1] // CHUNK)
        return heads, chunks, *chunk


@dataclass(frozen=True)
class Types:
    """The element types of the keys and of the values of a cache."""

    k: CacheType
    v: CacheType


def refusal_for_latents(types: Types, architecture: str) -> str:
    """Why a cache of latents cannot have these element types, as a sentence without a period; "" if it can."""
    if types.k == types.v and not types.k.quantized:
        return ""
    names = " and ".join(dict.fromkeys((types.k.name, types.v.name)))
    return (
        f"cache type {names} is not supported for the latents of {architecture}, which are keys and values at once; "
        "use f16 or f32 for both (cache_type=...)"
    )


CACHE_TYPES = {
    t.name: t
    for t in (
        *(CacheType("f32", 32), CacheType("f16", 16), CacheType("q8_0", 8), CacheType("q4_0", 4)),
        *(CacheType("i12", 12, True), CacheType("i8", 8, True)),
    )
}
"""The element types by the names that users give."""

F16, F32 = (Types(CACHE_TYPES[name], CACHE_TYPES[name]) for name in ("f16", "f32"))
"""Keys and values both in float16, and both in float32."""


def cache_type(name: str) -> CacheType:
    """The element type with this name.  Raises UsageError if there is none."""
    if not isinstance(name, str):
        raise UsageError(f"a cache type is given by its name, such as f16, not {described(name)}.")
    if name not in CACHE_TYPES:
        raise UsageError(f"cache type {described(name)} is unknown; use {', '.join(CACHE_TYPES)}.")
    return CACHE_TYPES[name]
