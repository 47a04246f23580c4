"""The configuration of two mixers in one layer."""

from dataclasses import dataclass

from engine.cache.pair import PairCacheSpec
from engine.models.mixer_config import MixerConfig, Scratch
from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class PairConfig(MixerConfig):
    """Two mixers that read the same input; both results are added to the residual stream.  Each has a cache of its own."""

    first: MixerConfig
    second: MixerConfig

    @property
    def _both(self) -> tuple[MixerConfig, MixerConfig]:
        return self.first, self.second

    def cache_spec(self, rewind: int, decode_rows: int) -> PairCacheSpec:
        """The specification of the cache: those of both mixers."""
        first, second = (mixer.cache_spec(rewind, decode_rows) for mixer in self._both)
        return PairCacheSpec(first, second)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of the intermediate results of both."""
        return sum(mixer.row_elements for mixer in self._both)

    @property
    def reads_together(self) -> bool:
        """Whether the rows of a pass of any size may belong to several sequences: if both can do this."""
        return self.first.reads_together and self.second.reads_together

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The rotations of both."""
        return self.first.rotations + self.second.rotations

    @property
    def rounding(self) -> str:
        """The name of the rule by which one of them rounds stored rows; "" if neither does."""
        return self.first.rounding or self.second.rounding

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """The memory in bytes that the one that needs more needs in a pass, because one is computed after the other."""
        return max(mixer.scratch_bytes(scratch, n_ctx, rows) for mixer in self._both)

    def score_bytes(self, n_ctx: int) -> int:
        """The memory in bytes per row that depends on the number of positions, of the one that needs more."""
        return max(mixer.score_bytes(n_ctx) for mixer in self._both)
