"""What every mixer answers about itself, from its description alone.

A kind of mixer is a subclass of :class:`MixerConfig`, a subclass of ``Mixer`` with its weights (``engine/models/mixer.py``),
and a function that loads them, which has an entry in a table (``engine/models/layer.py``).  Nothing else asks which kind a
layer has.
"""

from abc import ABC, abstractmethod
from typing import Protocol

from engine.cache.spec import CacheSpec
from engine.models.rope_config import RopeConfig


class Scratch(Protocol):
    """The sizes of a backend's intermediate results; ``engine.ops.operations.Operations`` has them."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention of ``n_head`` heads of size ``d_v`` over ``n_ctx`` positions needs besides the cache."""

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """Bytes that attention of ``n_head`` heads over latents of ``rank`` elements at ``n_ctx`` positions needs besides the
        cache, in passes of up to ``rows`` rows."""


class MixerConfig(ABC):
    """The sizes and options of a mixer.  A subclass is a frozen dataclass."""

    @abstractmethod
    def cache_spec(self, rewind: int, decode_rows: int) -> CacheSpec:
        """What a layer stores of earlier tokens, so that the latest ``rewind`` tokens can be rolled back; decode_rows: the
        most rows of a decode batch."""

    @property
    @abstractmethod
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of its intermediate results: queries, keys, values, gates."""

    @property
    def memory_source(self) -> int | None:
        """The index of the layer whose memory it reads; None: it has a memory of its own."""
        return None

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The rotations whose angles it needs."""
        return ()

    @property
    def rounding(self) -> str:
        """The name of the rule by which it rounds what it stores, for identities of states; "" for none."""
        return ""

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """Bytes that a pass of up to ``rows`` rows over ``n_ctx`` positions needs besides the rows themselves."""
        return 0

    def score_bytes(self, n_ctx: int) -> int:
        """Bytes per row that grow with the number of positions, ``n_ctx``."""
        return 0
