"""The block formats of GGUF tensors: layout, unit, and the bounds that keep their dot products exact.

A quantized row is a run of *blocks*.  In this engine a block is also a *unit*: the run of weights that share one
activation scale.  Every format, whatever its packing, defines the i-th weight of a unit in the same way::

    weight[i] = d * w[i] + dm * m[i // 16]          w: int16, m: int16 (0 where the format has no minimum)

with ``d`` and ``dm`` float32 and the integer sub-block scales already multiplied into ``w`` and ``m``.  A unit's part
of a dot product with int8 activations ``a`` of scale ``da`` is therefore two exact int32 sums and three roundings::

    I = sum(w[i] * a[i])      M = sum(m[g] * (a[16g] + ... + a[16g + 15]))
    acc = fma(da, fma(dm, float32(M), d * float32(I)), acc)

``Format.dot_bound`` and ``Format.min_bound`` bound ``|I|`` and ``|M|``; both stay below 2**31, so int32 never
overflows and each conversion to float32 rounds at most once.  Sources of the layouts: ``ggml-common.h`` of llama.cpp.
To add a format: one entry here and one class in ``engine/cpu/products/unpack.py``.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf.header import shown

ACTIVATION_MAX = 127
"""Largest magnitude of a quantized activation."""

TINY = np.float32(2.0**-100)
"""A unit of activations whose largest magnitude is below this counts as zero: 127 / magnitude could overflow."""

CHAINS = 8
"""Float accumulators of a quantized row: chain c owns the c-th contiguous run of ceil(units / 8) units."""

FLOAT_CHAINS = 32
"""Float accumulators of a float row: chain c owns the elements i with i % 32 == c."""


@dataclass(frozen=True)
class Format:
    """One entry of the table.

    ``block``: weights per block (1 for float formats); ``block_bytes``: its size in the file; ``weight_max``: largest
    ``|w|``; ``min_max``: largest ``|m|``, 0 where ``dm`` is not used; ``quantized``: False for F32, F16, BF16, whose
    rows are multiplied with float32 activations.
    """

    type: GGMLQuantizationType
    block: int
    block_bytes: int
    weight_max: int = 0
    min_max: int = 0
    quantized: bool = True

    @property
    def name(self) -> str:
        """GGUF's name of the format, e.g. ``Q4_K``."""
        return self.type.name

    @property
    def unit(self) -> int:
        """Weights that share one activation scale: 256 or 32."""
        return self.block

    @property
    def dot_bound(self) -> int:
        """Largest possible ``|I|`` of a unit."""
        return self.unit * self.weight_max * ACTIVATION_MAX

    @property
    def min_bound(self) -> int:
        """Largest possible ``|M|`` of a unit."""
        return self.unit * self.min_max * ACTIVATION_MAX

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights."""
        return columns // self.block * self.block_bytes


_T = GGMLQuantizationType

FORMATS: dict[GGMLQuantizationType, Format] = {
    f.type: f
    for f in (
        Format(_T.F32, 1, 4, quantized=False),
        Format(_T.F16, 1, 2, quantized=False),
        Format(_T.BF16, 1, 2, quantized=False),
        Format(_T.Q4_0, 32, 18, weight_max=8),
        Format(_T.Q4_1, 32, 20, weight_max=15, min_max=1),
        Format(_T.Q5_0, 32, 22, weight_max=16),
        Format(_T.Q5_1, 32, 24, weight_max=31, min_max=1),
        Format(_T.Q8_0, 32, 34, weight_max=128),
        Format(_T.Q2_K, 256, 84, weight_max=3 * 15, min_max=15),
        Format(_T.Q3_K, 256, 110, weight_max=4 * 32),
        Format(_T.Q4_K, 256, 144, weight_max=15 * 63, min_max=63),
        Format(_T.Q5_K, 256, 176, weight_max=31 * 63, min_max=63),
        Format(_T.Q6_K, 256, 210, weight_max=32 * 128),
        Format(_T.IQ2_XXS, 256, 66, weight_max=43 * 31),
        Format(_T.IQ4_NL, 32, 18, weight_max=127),
        Format(_T.IQ4_XS, 256, 136, weight_max=127 * 32),
        Format(_T.MXFP4, 32, 17, weight_max=12),
    )
}
"""Every format this engine can multiply with, by GGUF type."""


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
