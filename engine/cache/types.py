"""Element types of a key-value cache, and the memory layout of the quantized ones.

f32 and f16 are what they are called.  q8_0 and q4_0 are the block formats of the same names: 32 elements of a head share a
float16 scale and have 8 or 4 bits each.  A chunk of 64 positions of one head is then a run of words, first the integers, then
the scales:

- keys: 16 (q8_0) or 32 (q4_0) dimensions of a position are four adjacent words, [d_k / 16 or / 32][64][4]; scales
  [d_k / 32][64];
- values: the words of a position are adjacent, [64][d_v / 4 or / 8]; scales [64][d_v / 32].

A word of q8_0 has four integers of 8 bits, the first lowest.  A word of q4_0 has eight of 4 bits, each plus 8: the low halves
of its bytes are elements 0 to 3, the high halves 4 to 7.

i8 and i12 are integers whose products attention adds as integers (``engine/cpu/integer_attention.py``).  As many elements as
the largest power of two that divides the head, at most 128, share a float16 scale.  An integer of i12 is 16 h + l: h has 8
bits, l has 4 and no sign.  A chunk of one head is a run of words, first the bytes (i8) or all h, then all l, then the scales:

- keys: a word has four dimensions of a position, [d_k / 4][64]; the halves of the bytes of words l are dimensions 8 i to
  8 i + 3 and 8 i + 4 to 8 i + 7, [d_k / 8][64];
- values: a word has four positions of a dimension, [16][d_v]; the halves of the bytes of words l are dimensions i and
  i + B / 2 of a block of B, [16][d_v / 2], so that no two positions share a byte;
- scales of both: [blocks][64].
"""

from dataclasses import dataclass

import numpy as np

from engine.checks import described
from engine.errors import UsageError

CHUNK = 64
"""Positions of a chunk."""

BLOCK = 32
"""Elements of a quantized head that share a scale, and the fewest of an integer cache."""

MOST_BLOCK = 128
"""The most elements of an integer cache that share a scale."""

GROUP = 8
"""Chunks that attention joins with one another before it joins them with others."""


@dataclass(frozen=True)
class CacheType:
    """An element type; ``bits`` is the size of an element, without its share of a scale; ``whole``: whether attention adds
    products of its elements as integers."""

    name: str
    bits: int
    whole: bool = False

    @property
    def quantized(self) -> bool:
        """Whether elements are integers that share a scale per block."""
        return self.bits < 16

    @property
    def most(self) -> int:
        """The largest magnitude of an integer."""
        return (1 << (self.bits - 1)) - 1

    def block(self, d: int) -> int:
        """The number of elements of a head of d elements that share a scale; 0 if d cannot be divided into blocks."""
        block = min(d & -d, MOST_BLOCK) if self.whole else BLOCK
        return block if block >= BLOCK and d % block == 0 else 0

    def row_bytes(self, d: int) -> int:
        """Bytes of a key or value of d elements, including scales."""
        return d * self.bits // 8 + (2 * d // self.block(d) if self.quantized else 0)

    def integer_words(self, d: int) -> int:
        """Words of the elements of one head in a chunk, without scales."""
        return CHUNK * d * self.bits // 32

    def chunk_words(self, d: int) -> int:
        """Words of one head in a chunk, including scales."""
        return CHUNK * self.row_bytes(d) // 4

    @property
    def dtype(self) -> type:
        """The dtype of the array: float32, uint16 for the bits of float16, or uint32 for words."""
        return np.uint32 if self.quantized else np.uint16 if self.bits == 16 else np.float32

    def shape(self, heads: int, chunks: int, *chunk: int) -> tuple[int, ...]:
        """The shape of the array of a layer whose chunks have the shape ``chunk``, or are words if they are quantized."""
        if self.quantized:
            return heads, chunks, self.chunk_words(chunk[0] * chunk[1] // CHUNK)
        return heads, chunks, *chunk


@dataclass(frozen=True)
class Types:
    """Element types of the keys and of the values of a cache."""

    k: CacheType
    v: CacheType


def refusal_for_latents(types: Types, architecture: str) -> str:
    """Why a cache of latents cannot have elements of these types (``CacheSpec.refusal``); "" if it can."""
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
"""Types by the names that users give."""

F16, F32 = (Types(CACHE_TYPES[name], CACHE_TYPES[name]) for name in ("f16", "f32"))
"""Keys and values that are both float16, or both float32."""


def cache_type(name: str) -> CacheType:
    """The type of a name; raises UsageError if there is none."""
    if not isinstance(name, str):
        raise UsageError(f"a cache type is given by its name, such as f16, not {described(name)}.")
    if name not in CACHE_TYPES:
        raise UsageError(f"cache type {described(name)} is unknown; use {', '.join(CACHE_TYPES)}.")
    return CACHE_TYPES[name]
