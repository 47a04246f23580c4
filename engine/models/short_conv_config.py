"""The configuration of a gated short convolution."""

from dataclasses import dataclass

from engine.cache.short_conv import ShortConvCacheSpec
from engine.models.mixer_config import MixerConfig


@dataclass(frozen=True)
class ShortConvConfig(MixerConfig):
    """A mixer: a gated short convolution.

    n: the number of channels, which is the width of the residual stream.
    taps: the number of latest tokens from which each element is computed, the token itself included.
    """

    n: int
    taps: int

    def cache_spec(self, rewind: int, decode_rows: int) -> ShortConvCacheSpec:
        """The specification of the cache: the inputs of the convolution for the latest tokens."""
        return ShortConvCacheSpec(self.n, self.taps, rewind, decode_rows)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of the three parts of a row, and of the result."""
        return 4 * self.n
