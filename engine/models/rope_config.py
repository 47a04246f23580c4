"""The rotation of queries and keys."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of queries and keys.

    n_rot: the number of rotated elements of a head.
    base: the frequency base.
    scale: the linear scale of positions, which is 1 / factor.
    neox: whether rotation pairs are (i, i + n_rot / 2); otherwise they are (2i, 2i + 1).
    factors: the name of the tensor with a divisor for each frequency; "" if there is none.
    magnitude: the factor of cosines and sines.
    yarn_ctx: the original context of YaRN's frequency correction (Peng et al. 2023); 0: there is no correction.
    beta_fast, beta_slow: YaRN keeps frequencies with at least beta_fast turns over the original context, and interpolates
        frequencies with at most beta_slow turns.
    truncate: whether the bounds between these frequencies are rounded to whole pairs.
    long_factors: the name of the tensor that replaces ``factors`` in contexts of more than long_beyond positions; "" if there
        is none.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    neox: bool = True
    factors: str = ""
    magnitude: float = 1.0
    yarn_ctx: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    long_factors: str = ""
    long_beyond: int = 0
