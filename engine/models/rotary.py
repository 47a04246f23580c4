"""The table of rotation angles, computed on the host in float64 and rounded once to float32.

angle(p, i) = p * base^(-2i / n_rot) / factors[i] * scale (Su et al. 2021; ``factors`` as in Llama 3).  With YaRN (Peng et al.
2023), low frequencies are interpolated, and high frequencies are kept.  Cosines and sines are multiplied by a magnitude.
"""

import math

import numpy as np

from engine.models.rope_config import RopeConfig
from engine.ops.operations import Ops

BLOCK = 1024


def frequencies(rope: RopeConfig, factors: np.ndarray | None) -> np.ndarray:
    """The angle of each pair in radians per position: float64 [n_rot / 2].

    factors: divisors of the frequencies, float32 [n_rot / 2], or None.
    """
    half = rope.n_rot // 2
    plain = np.array([rope.base ** (-2.0 * i / rope.n_rot) for i in range(half)])
    if factors is not None:
        plain = plain / factors.astype(np.float64)
    if not rope.yarn_ctx:
        return plain * rope.scale

    def dimension(turns: float) -> float:
        """The index of the pair with this number of turns over the original context."""
        ratio = rope.yarn_ctx / (turns * 2 * math.pi)
        return rope.n_rot * math.log(ratio) / (2 * math.log(rope.base))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    low, high = max(0.0, first), min(rope.n_rot - 1.0, last)
    ramp = 1.0 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
    return plain * (rope.scale * (1.0 - ramp) + ramp)


class Rotary:
    """Rotation angles by position.

    ``table`` float32 [n_ctx, 2, n_rot / 2] contains cosines and sines.  It has a fixed address, and is filled when positions
    are requested.
    """

    def __init__(self, ops: Ops, rope: RopeConfig, factors: np.ndarray | None, n_ctx: int) -> None:
        self._ops = ops
        self._frequencies = frequencies(rope, factors)
        self._magnitude = rope.magnitude
        self._n_ctx = n_ctx
        self._filled = 0
        self.table = ops.zeros((n_ctx, 2, rope.n_rot // 2), np.float32)

    def turns_as(self, rope: RopeConfig, factors: np.ndarray | None) -> bool:
        """Whether the angles are equal to those of the given rotation and factors."""
        own = self._frequencies
        return self._magnitude == rope.magnitude and np.array_equal(own, frequencies(rope, factors))

    def reserve(self, positions: int) -> None:
        """Fill the table for positions [0, positions), rounded up to whole blocks."""
        if positions > self._filled:
            end = min(self._n_ctx, -(-positions // BLOCK) * BLOCK)
            angle = np.arange(self._filled, end, dtype=np.float64)[:, None] * self._frequencies[None, :]
            both = np.stack([np.cos(angle), np.sin(angle)], axis=1) * self._magnitude
            self._ops.store(self.table, self._filled, both.astype(np.float32))
            self._filled = end
