"""Rotary position embedding (Su et al. 2021), and factors by position.

Formula: for pair i of a head, (a, b) -> (a cos - b sin, a sin + b cos), angle = position * frequency[i]; a factor by position
    multiplies every element of a head.  The tail: the last n_rot dims, perhaps after a norm of the head, perhaps by the
    opposite angle.
Shapes: x, y float32 [rows, heads, head_dim]; table float32 [positions, 2, n_rot / 2] (cos, sin); dims >= n_rot pass, or those
    before the tail; factors float32 [positions]; norm float32 [head_dim], or [0] for none.
Who owns what: an item is a head of a row, row * heads + head.
Reduction order: fma(a, cos, -(b sin)) and fma(a, sin, b cos); norms as in ``engine/cpu/rms_norm.py``.
Bytes moved: 8 head_dim per head.
"""

import numpy as np
from numba import njit

from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms
from engine.numerics import fma


@njit(cache=True)
def rope(x, positions, table, neox, y, first, last):
    """y = x rotated, for the items [first, last); y may be x.  Pairs are (i, i + n_rot / 2) where ``neox``, else
    (2i, 2i + 1)."""
    half, heads = table.shape[2], x.shape[1]
    for item in range(first, last):
        t, h = item // heads, item % heads
        cos, sin = table[positions[t], 0], table[positions[t], 1]
        head, out = x[t, h], y[t, h]
        if neox:  # slices, so that the loop becomes vector operations
            ones, others, out_ones, out_others = head[:half], head[half:], out[:half], out[half:]
            for i in range(half):
                a, b = ones[i], others[i]
                out_ones[i] = fma(a, cos[i], -(b * sin[i]))
                out_others[i] = fma(a, sin[i], b * cos[i])
        else:
            for i in range(half):
                a, b = head[2 * i], head[2 * i + 1]
                out[2 * i] = fma(a, cos[i], -(b * sin[i]))
                out[2 * i + 1] = fma(a, sin[i], b * cos[i])
        for i in range(2 * half, head.size):
            out[i] = head[i]


@njit(cache=True)
def scale_by_position(x, positions, factors, y, first, last):
    """y = x times the factors of its positions, for the items [first, last); y may be x."""
    heads = x.shape[1]
    for item in range(first, last):
        t, h = item // heads, item % heads
        factor, head, out = factors[positions[t]], x[t, h], y[t, h]
        for i in range(out.size):
            out[i] = head[i] * factor


@njit(cache=True, error_model="numpy")
def rotate_pairs(x, cos, sin, inverse):
    """Rotate the last pairs (2i, 2i + 1) of x float32 [d], in place; ``inverse``: by the opposite angles."""
    tail = x[x.size - 2 * cos.size :]
    for i in range(cos.size):
        a, b, s = tail[2 * i], tail[2 * i + 1], -sin[i] if inverse else sin[i]
        tail[2 * i] = fma(a, cos[i], -(b * s))
        tail[2 * i + 1] = fma(a, s, b * cos[i])


@njit(cache=True, error_model="numpy")
def rotate_tail(x, norm, eps, positions, table, inverse, y, first, last):
    """y = x, normalized if there is a norm, with its tail rotated, for the items [first, last); y may be x."""
    heads, d = x.shape[1], x.shape[2]
    chains = np.empty(NORM_CHAINS, np.float32)
    for item in range(first, last):
        t, h = item // heads, item % heads
        head, out = x[t, h], y[t, h]
        if norm.size > 0:
            r = inverse_rms(head, eps, chains)
            for i in range(d):
                out[i] = head[i] * r * norm[i]
        else:
            for i in range(d):
                out[i] = head[i]
        rotate_pairs(out, table[positions[t], 0], table[positions[t], 1], inverse)
