"""The description of attention."""

from dataclasses import dataclass

from engine.cache.kv import AttentionCacheSpec
from engine.models.mixer_config import MixerConfig, Scratch
from engine.models.rope_config import RopeConfig


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """A mixer: causal attention of n_head heads of queries over n_head_kv heads of keys of d_k and values of d_v elements.

    scale: the factor of the scores.
    rope: the rotation of queries and keys; None: they are not rotated.
    window: the number of latest positions that a token sees; 0: all.
    norm: how queries and keys are normalized: "" not at all, "heads" each head by itself, "rotated heads" each head after its
        rotation, "rows" all heads of a row together.
    normed_values: whether heads of values are normalized too, without weights.
    gated: whether the result of each head is multiplied by sigmoid of gates that follow its queries.
    sinks: whether each head has a sink, an additional term of its softmax.
    temperature: (s, n): queries at position p are multiplied by 1 + s ln(1 + p // n); None: they are not.
    source: the layer whose keys and values it reads; None: its own.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    scale: float
    rope: RopeConfig | None
    window: int = 0
    norm: str = ""
    normed_values: bool = False
    gated: bool = False
    sinks: bool = False
    temperature: tuple[float, int] | None = None
    source: int | None = None

    def cache_spec(self, rewind: int, decode_rows: int) -> AttentionCacheSpec:
        """Keys and values."""
        return AttentionCacheSpec(self.n_head_kv, self.d_k, self.d_v, self.window, decode_rows)

    @property
    def row_elements(self) -> int:
        """Queries with their gates, keys, values and results."""
        return self.n_head * (3 * self.d_k + self.d_v) + self.n_head_kv * (self.d_k + self.d_v)

    @property
    def memory_source(self) -> int | None:
        """``source``."""
        return self.source

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """``rope``, if there is one."""
        return () if self.rope is None else (self.rope,)

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """The results of chunks before they are joined."""
        return scratch.scratch_bytes(self.n_head, self.d_v, n_ctx)
