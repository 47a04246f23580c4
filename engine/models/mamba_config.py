"""The configuration of a Mamba-2 layer."""

from dataclasses import dataclass

from engine.cache.mamba import MambaCacheSpec
from engine.models.metadata import Metadata
from engine.models.mixer_config import MixerConfig
from engine.ops.mamba import MambaSizes


@dataclass(frozen=True)
class MambaConfig(MambaSizes, MixerConfig):
    """A mixer: Mamba-2 with the sizes of :class:`MambaSizes`.

    normed: whether results are normalized before the output layer.
    """

    normed: bool = True

    def cache_spec(self, rewind: int, decode_rows: int) -> MambaCacheSpec:
        """The specification of the cache: states, the latest tokens, and inputs of the convolution."""
        sizes = self.n_channels, self.taps, self.n_head, self.d, self.n, self.width
        return MambaCacheSpec(*sizes, rewind, decode_rows)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of channels before and after the convolution, gates and results."""
        return 2 * self.width + 3 * self.d_inner


def read_mamba(m: Metadata) -> MambaConfig:
    """The Mamba-2 mixer of a file, which has the same sizes in all layers that have one."""
    n_head = m.integer("ssm.time_step_rank", most=4096)
    n_group = m.integer("ssm.group_count", most=4096)
    n, inner = m.integer("ssm.state_size"), m.integer("ssm.inner_size")
    if n % 32 or n > 256:
        m.refuse("ssm.state_size", f"is {n}, and multiples of 32 up to 256 are supported")
    if n_head % 2 or inner % n_head:
        m.refuse(
            "ssm.time_step_rank", f"is {n_head}, and an even number that divides the {inner} elements is supported"
        )
    if inner // n_head % 16:
        m.refuse("ssm.inner_size", f"is {inner}, and heads of a multiple of 16 elements are supported")
    if n_head % n_group:
        m.refuse("ssm.group_count", f"is {n_group}, which does not divide the {n_head} heads")
    return MambaConfig(n_head, inner // n_head, n, n_group, m.integer("ssm.conv_kernel", None, 2, 8))
