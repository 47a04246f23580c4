"""The interface of the configuration of mixers.

A kind of mixer consists of a subclass of :class:`MixerConfig`, a subclass of ``Mixer`` with its weights
(``engine/models/mixer.py``), and a function that loads the weights, which has an entry in a table
(``engine/models/layer.py``).  No other code depends on the kind.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from engine.cache.spec import CacheSpec
from engine.limits import MOST_OWNERS
from engine.models.rope_config import RopeConfig


class Scratch(Protocol):
    """The sizes of a backend's intermediate results.  ``engine.ops.operations.Operations`` implements this interface."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """The memory in bytes, not counting the cache, that attention of ``n_head`` heads of size ``d_v`` over ``n_ctx``
        positions needs."""

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """The memory in bytes, not counting the cache, that attention of ``n_head`` heads over latents of ``rank`` elements
        at ``n_ctx`` positions needs in passes of up to ``rows`` rows."""


class MixerConfig(ABC):
    """The sizes and options of a mixer.  A subclass is a frozen dataclass."""

    @abstractmethod
    def cache_spec(self, rewind: int, decode_rows: int) -> CacheSpec:
        """The specification of the cache of a layer.

        rewind: the number of tokens that can always be rolled back.
        decode_rows: the maximum number of rows in a decode batch.
        """

    @property
    @abstractmethod
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of the intermediate results, such as queries, keys and values."""

    @property
    def exists(self) -> bool:
        """Whether layers have the mixer; False only for :class:`NoMixer`."""
        return True

    @property
    def memory_source(self) -> int | None:
        """The index of the layer whose cache is read; None: the layer has its own cache."""
        return None

    @property
    def n_shared(self) -> int:
        """The number of elements of 4 bytes per row that the mixer takes from a mixer of an earlier layer; 0: none."""
        return 0

    @property
    def reads_together(self) -> bool:
        """Whether the rows of a pass of any size may belong to several sequences; otherwise only those of a decode batch."""
        return True

    @property
    def most_owners(self) -> int:
        """The most devices that can share a layer with the mixer, each with heads of its own; 0: it cannot be shared."""
        return 0

    def part(self, owner: int, n_owners: int) -> "MixerConfig":
        """The mixer with the heads of one of several devices that share it, as far as :meth:`scratch_bytes` depends on
        them."""
        return self

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """The rotations whose angles the mixer needs."""
        return ()

    @property
    def rounding(self) -> str:
        """The name of the rule by which stored rows are rounded; "" if they are not rounded.  It is part of the identity of
        saved states."""
        return ""

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """The memory in bytes, not counting the rows themselves, that a pass of up to ``rows`` rows over ``n_ctx`` positions
        needs."""
        return 0

    def score_bytes(self, n_ctx: int) -> int:
        """The memory in bytes per row that depends on the number of positions, ``n_ctx``."""
        return 0


@dataclass(frozen=True)
class NoMixer(MixerConfig):
    """The place of the mixer in a layer that only has a network.  Such a layer has no cache."""

    def cache_spec(self, rewind: int, decode_rows: int) -> CacheSpec:
        """There is no cache: raises TypeError."""
        raise TypeError("a layer without a mixer has no cache")

    @property
    def row_elements(self) -> int:
        """0: there are no intermediate results."""
        return 0

    @property
    def exists(self) -> bool:
        """False: the layer has no mixer."""
        return False

    @property
    def most_owners(self) -> int:
        """Any number: there is nothing to share."""
        return MOST_OWNERS
