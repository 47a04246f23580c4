"""The tables that formats look their weights up in: unpacked from the classes of ``gguf.quants``, which hold them compressed.

A grid is a flat array of bytes, 8 or 4 for each entry, the weights of consecutive positions.
"""

from typing import Any

import numpy as np
from gguf import quants


def _grid(format: Any, kind: type[np.generic]) -> np.ndarray:
    """The grid of a class of ``gguf.quants``, flat."""
    format.init_grid()
    return np.ascontiguousarray(format.grid.reshape(-1).astype(kind))


IQ2_XXS_GRID = _grid(quants.IQ2_XXS, np.uint8)
"""256 entries of 8 magnitudes, each 8, 25 or 43."""
IQ2_XS_GRID = _grid(quants.IQ2_XS, np.uint8)
"""512 entries of 8 magnitudes, each 8, 25 or 43."""
IQ2_S_GRID = _grid(quants.IQ2_S, np.uint8)
"""1024 entries of 8 magnitudes, each 8, 25 or 43."""
IQ3_XXS_GRID = _grid(quants.IQ3_XXS, np.uint8)
"""256 entries of 4 magnitudes, each 4, 12, 20, 28, 36, 44, 52 or 62."""
IQ3_S_GRID = _grid(quants.IQ3_S, np.uint8)
"""512 entries of 4 magnitudes, each odd and below 16."""
IQ1_GRID = _grid(quants.IQ1_S, np.int8)
"""2048 entries of 8 values, each -1, 0 or 1, of IQ1_S and IQ1_M."""

IQ4_VALUES: tuple[int, ...] = quants.IQ4_NL.kvalues
"""The 16 values of IQ4_NL and IQ4_XS."""
FP4_VALUES: tuple[int, ...] = quants.MXFP4.kvalues
"""The values of the 16 e2m1 floats of MXFP4 and NVFP4 (OCP MX, 2023), doubled so that they are integers."""
