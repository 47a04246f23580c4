"""The configuration of a gated delta net."""

from dataclasses import dataclass

from engine.cache.recurrent import RecurrentCacheSpec
from engine.models.mixer_config import MixerConfig
from engine.ops.delta_net import DeltaNetSizes


@dataclass(frozen=True)
class DeltaNetConfig(DeltaNetSizes, MixerConfig):
    """A mixer: a gated delta net with the sizes of :class:`DeltaNetSizes`."""

    def cache_spec(self, rewind: int, decode_rows: int) -> RecurrentCacheSpec:
        """The specification of the cache: states, updates of the latest tokens, and inputs of the convolution."""
        return RecurrentCacheSpec(
            self.n_channels,
            self.n_conv,
            self.n_k,
            self.n_v,
            self.state_size,
            rewind,
            decode_rows,
            self.grouped,
        )

    @property
    def most_owners(self) -> int:
        """The number of key heads, each with its value heads."""
        return self.n_k

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of channels before and after the convolution, gates and results."""
        return 2 * self.n_channels + 2 * self.n_v * self.state_size
