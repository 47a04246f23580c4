"""The configuration of Kimi delta attention."""

from dataclasses import dataclass

from engine.cache.mamba import MambaCacheSpec
from engine.models.metadata import Metadata
from engine.models.mixer_config import MixerConfig
from engine.ops.kda import KDASizes


@dataclass(frozen=True)
class KDAConfig(KDASizes, MixerConfig):
    """A mixer: Kimi delta attention with the sizes of :class:`KDASizes`."""

    def cache_spec(self, rewind: int, decode_rows: int) -> MambaCacheSpec:
        """The specification of the cache: states, the latest tokens, and inputs of the convolutions."""
        sizes = self.n_channels, self.taps, self.n_head, self.d, self.d, self.width
        return MambaCacheSpec(*sizes, rewind, decode_rows)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of channels before and after the convolutions, decays, gates and
        results."""
        return 2 * self.n_channels + 4 * self.d_inner + 2 * self.d


def read_kda(m: Metadata) -> KDAConfig:
    """The Kimi delta attention of a file, which has the same sizes in all layers that have it."""
    n_head, d = m.counts("attention.head_count")[0], m.integer("kda.head_dim")
    if d % 32 or d > 128:
        m.refuse("kda.head_dim", f"is {d}, and heads of 32, 64, 96 or 128 are supported")
    if n_head % 4 or n_head > 1024:
        m.refuse("attention.head_count", f"is {n_head}, and multiples of 4 up to 1024 are supported")
    return KDAConfig(n_head, d, m.integer("ssm.conv_kernel", None, 2, 8))
