"""The block formats of GGUF tensors: layout, unit, and the bounds that keep their dot products exact.

A quantized row is a run of *blocks*.  In this engine a block is also a *unit*, the run of weights that share one
activation scale, except that a block of NVFP4 is four units, because it has four floats.  Every format, whatever its packing,
defines the i-th weight of a unit in the same way::

    weight[i] = d * w[i] + dm * m[i // 16]          w: int16, m: int16 (0 where the format has no minimum)

with ``d`` and ``dm`` float32 and the integer sub-block scales already multiplied into ``w`` and ``m``.  A unit's part
of a dot product with int8 activations ``a`` of scale ``da`` is therefore two exact int32 sums and three roundings::

    I = sum(w[i] * a[i])      M = sum(m[g] * (a[16g] + ... + a[16g + 15]))
    acc = fma(da, fma(dm, float32(M), d * float32(I)), acc)

``Format.dot_bound`` and ``Format.min_bound`` bound ``|I|`` and ``|M|``; both stay below 2**31, so int32 never
overflows and each conversion to float32 rounds at most once.  Sources of the layouts: ``ggml-common.h`` of llama.cpp.
To add a format: one entry here, and what ``docs/tensors.md`` lists.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from engine.checks import shown
from engine.errors import ModelError

ACTIVATION_MAX = 127
"""Largest magnitude of a quantized activation."""

TINY = np.float32(2.0**-100)
"""A unit of activations whose largest magnitude is below this counts as zero: 127 / magnitude could overflow."""

CHAINS = 8
"""Float accumulators of a quantized row: chain c owns the c-th contiguous run of ceil(units / 8) units."""

FLOAT_CHAINS = 32
"""Float accumulators of a float row: chain c owns the elements i with i % 32 == c."""


@dataclass(frozen=True)
class Field:
    """``length`` bytes of a block, from byte ``start`` on.

    ``name``: "factors" (d, then the factor of the minimums), "scales" (integers that multiply sub-blocks), "quants" (the
    weights, or what they are looked up by), "high" (further bits of them) or "signs".  ``bits``: one bit for each weight, in
    order, the lowest bit of a byte first.
    """

    name: str
    start: int
    length: int
    bits: bool = False


@dataclass(frozen=True)
class Format:
    """One entry of the table.

    ``block``: weights per block (1 for float formats); ``block_bytes``: its size in the file; ``fields``: of the bytes of a
    block, each byte in one of them; ``weight_max``: largest ``|w|``; ``min_max``: largest ``|m|``, 0 where ``dm`` is not
    used; ``d_scale``: a power of two, ``d`` is the float of the block times it; ``parts``: units of a block, of which each
    has the same share of each field; ``quantized``: False for F32, F16, BF16, whose rows are multiplied with float32
    activations.
    """

    type: GGMLQuantizationType
    block: int
    block_bytes: int
    fields: tuple[Field, ...] = ()
    weight_max: int = 0
    min_max: int = 0
    d_scale: float = 1.0
    parts: int = 1
    quantized: bool = True

    @property
    def name(self) -> str:
        """GGUF's name of the format, e.g. ``Q4_K``."""
        return self.type.name

    @property
    def unit(self) -> int:
        """Weights that share one activation scale: 256, 128, 64, 32 or 16."""
        return self.block // self.parts

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return self.block_bytes // self.parts

    @property
    def dot_bound(self) -> int:
        """Largest possible ``|I|`` of a unit."""
        return self.unit * self.weight_max * ACTIVATION_MAX

    @property
    def min_bound(self) -> int:
        """Largest possible ``|M|`` of a unit."""
        return self.unit * self.min_max * ACTIVATION_MAX

    def field(self, name: str) -> Field:
        """The field of a name; raises KeyError if the format has none."""
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights."""
        return columns // self.block * self.block_bytes


_T = GGMLQuantizationType


def _fields(**places: tuple[int, int]) -> tuple[Field, ...]:
    """The fields of a block, in the order of a record; a name with ``_bits`` has one bit for each weight."""
    return tuple(Field(name.removesuffix("_bits"), *place, name.endswith("_bits")) for name, place in places.items())


_NIBBLES = _fields(factors=(0, 2), quants=(2, 16))

FORMATS: dict[GGMLQuantizationType, Format] = {
    f.type: f
    for f in (
        Format(_T.F32, 1, 4, quantized=False),
        Format(_T.F16, 1, 2, quantized=False),
        Format(_T.BF16, 1, 2, quantized=False),
        Format(_T.Q4_0, 32, 18, _NIBBLES, weight_max=8),
        Format(_T.Q4_1, 32, 20, _fields(factors=(0, 4), quants=(4, 16)), weight_max=15, min_max=1),
        Format(_T.Q5_0, 32, 22, _fields(factors=(0, 2), high_bits=(2, 4), quants=(6, 16)), weight_max=16),
        Format(_T.Q5_1, 32, 24, _fields(factors=(0, 4), high_bits=(4, 4), quants=(8, 16)), weight_max=31, min_max=1),
        Format(_T.Q8_0, 32, 34, _fields(factors=(0, 2), quants=(2, 32)), weight_max=128),
        Format(
            *(_T.Q2_K, 256, 84, _fields(factors=(80, 4), scales=(0, 16), quants=(16, 64))),
            weight_max=3 * 15,
            min_max=15,
        ),
        Format(
            *(_T.Q3_K, 256, 110, _fields(factors=(108, 2), scales=(96, 12), high=(0, 32), quants=(32, 64))),
            weight_max=4 * 32,
        ),
        Format(
            *(_T.Q4_K, 256, 144, _fields(factors=(0, 4), scales=(4, 12), quants=(16, 128))),
            weight_max=15 * 63,
            min_max=63,
        ),
        Format(
            *(_T.Q5_K, 256, 176, _fields(factors=(0, 4), scales=(4, 12), high=(16, 32), quants=(48, 128))),
            weight_max=31 * 63,
            min_max=63,
        ),
        Format(
            *(_T.Q6_K, 256, 210, _fields(factors=(208, 2), scales=(192, 16), quants=(0, 128), high=(128, 64))),
            weight_max=32 * 128,
        ),
        Format(_T.IQ2_XXS, 256, 66, _fields(factors=(0, 2), quants=(2, 64)), weight_max=43 * 31, d_scale=0.125),
        Format(_T.IQ4_NL, 32, 18, _NIBBLES, weight_max=127),
        Format(_T.IQ4_XS, 256, 136, _fields(factors=(0, 2), scales=(2, 6), quants=(8, 128)), weight_max=127 * 32),
        Format(_T.MXFP4, 32, 17, _fields(factors=(0, 1), quants=(1, 16)), weight_max=12),
        Format(
            *(_T.IQ2_XS, 256, 74, _fields(factors=(0, 2), scales=(66, 8), quants=(2, 64))),
            weight_max=43 * 31,
            d_scale=0.125,
        ),
        Format(
            _T.IQ2_S,
            *(256, 82, _fields(factors=(0, 2), scales=(74, 8), quants=(2, 32), high=(66, 8), signs_bits=(34, 32))),
            weight_max=43 * 31,
            d_scale=0.125,
        ),
        Format(
            *(_T.IQ3_XXS, 256, 98, _fields(factors=(0, 2), quants=(2, 64), signs=(66, 32))),
            weight_max=62 * 31,
            d_scale=0.25,
        ),
        Format(
            _T.IQ3_S,
            *(256, 110, _fields(factors=(0, 2), scales=(106, 4), quants=(2, 64), high=(66, 8), signs_bits=(74, 32))),
            weight_max=15 * 31,
        ),
        Format(
            *(_T.IQ1_S, 256, 50, _fields(factors=(0, 2), quants=(2, 32), high=(34, 16))),
            weight_max=9 * 15,
            d_scale=0.125,
        ),
        Format(
            *(_T.IQ1_M, 256, 56, _fields(scales=(48, 8), quants=(0, 32), high=(32, 16))),
            weight_max=9 * 15,
            d_scale=0.125,
        ),
        Format(_T.NVFP4, 64, 36, _fields(factors=(0, 4), quants=(4, 32)), weight_max=12, parts=4),
        Format(_T.TQ2_0, 256, 66, _fields(factors=(64, 2), quants=(0, 64)), weight_max=2),
        Format(_T.TQ1_0, 256, 54, _fields(factors=(52, 2), quants=(0, 48), high=(48, 4)), weight_max=1),
        Format(_T.Q1_0, 128, 18, _fields(factors=(0, 2), quants_bits=(2, 16)), weight_max=1),
    )
}
"""Every format this engine can multiply with, by GGUF type."""

if "Q2_0" in _T.__members__:  # versions of the gguf package up to 0.19 do not know it
    FORMATS[_T["Q2_0"]] = Format(_T["Q2_0"], 64, 18, _NIBBLES, weight_max=2)


def format_of(type_: GGMLQuantizationType, *tensors: str) -> Format:
    """The table entry of a GGUF type; raises ModelError with the format and the ``tensors`` that use it if there is none."""
    entry = FORMATS.get(type_)
    if entry is None:
        names = ", ".join(shown(name) for name in tensors[:4]) + (
            f" and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        )
        raise ModelError(
            f"format {type_.name} (tensors: {names or 'unnamed'}) is not supported; "
            f"use a file quantized to one of {', '.join(f.name for f in FORMATS.values())}."
        )
    return entry
