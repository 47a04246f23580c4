"""Rotary position embedding (Su et al. 2021), in place.

Formula: for pair i of a head, (a, b) -> (a cos - b sin, a sin + b cos), angle = position * frequency[i].
Shapes: x float32 [rows, heads, head_dim]; table float32 [positions, 2, n_rot / 2] (cos, sin); dims >= n_rot pass.
Who owns what: one call, one thread.
Reduction order: fma(a, cos, -(b sin)) and fma(a, sin, b cos).
Bytes moved: 8 n_rot per head.
"""

from numba import njit

from engine.numerics import fma


@njit(cache=True)
def rope(x, positions, table, neox):  # type: ignore[no-untyped-def]
    """Rotate x in place; pairs are (i, i + n_rot / 2) where ``neox``, else (2i, 2i + 1)."""
    half = table.shape[2]
    for t in range(x.shape[0]):
        cos = table[positions[t], 0]
        sin = table[positions[t], 1]
        for h in range(x.shape[1]):
            head = x[t, h]
            for i in range(half):
                first = i if neox else 2 * i
                second = i + half if neox else 2 * i + 1
                a = head[first]
                b = head[second]
                head[first] = fma(a, cos[i], -(b * sin[i]))
                head[second] = fma(a, sin[i], b * cos[i])
