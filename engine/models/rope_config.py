"""The rotation of queries and keys."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of queries and keys: the number of dimensions ``n_rot``, the frequency base, and the linear scale (1 /
    factor).

    neox: pairs are (i, i + n_rot / 2), else (2i, 2i + 1).
    factors: the tensor that holds a divisor of each frequency; "" for none.
    magnitude: the factor of cosines and sines.
    yarn_ctx: the original context of YaRN's frequency correction (Peng et al. 2023); 0: no correction.
    beta_fast, beta_slow: YaRN keeps frequencies that make at least beta_fast turns over the original context, and
        interpolates those that make at most beta_slow.
    truncate: whether the pairs at which this happens are rounded to integers.
    long_factors: the tensor that takes the place of ``factors`` in contexts of more than long_beyond positions; "" for none.
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
