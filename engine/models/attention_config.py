"""The configuration of attention."""

from dataclasses import dataclass, replace

from engine.cache.kv import AttentionCacheSpec
from engine.models.mixer_config import MixerConfig, Scratch
from engine.models.rope_config import RopeConfig
from engine.shares import share


@dataclass(frozen=True)
class AttentionConfig(MixerConfig):
    """A mixer: attention of n_head query heads over n_head_kv heads of keys and values.

    d_k, d_v: the number of elements of a query or key, and of a value.

    scale: the factor of the scores.
    rope: the rotation of queries and keys; None: there is no rotation.
    window: the number of latest positions that a token sees, its own included; 0: all.
    norm: how queries and keys are normalized: "" for no norm, "heads" for each head separately, "rotated heads" for each head
        separately after its rotation, "rows" for all heads of a row together, "centered heads" for each head separately by
        layer_norm, with weights of its own.
    normed_values: whether heads of values are also normalized, without weights.
    keys_are_values: whether the layer has no matrix of values, and its keys, before norm and rotation, are also the values.
    value_scale: a factor of the results of attention.
    gated: whether the result of each head is multiplied by sigmoid(gates), with the gates computed together with the queries.
    head_gates: whether the result of each head is multiplied by sigmoid(its gate), with gates that a matrix of their own
        computes.
    sinks: whether each head has a sink, which is an additional term of its softmax.
    softcap: the bound c of scores s, which are replaced by c tanh(s / c); 0: they are not bounded.
    temperature: (s, n, o), if queries at position p are multiplied by 1 + s ln(1 + (p + o) // n); None: there is no such
        factor.
    source: the index of the layer whose keys and values are read; None: the layer has its own.
    n_in: the width of its inputs; 0: that of the residual stream.
    hides_first: whether no token sees position 0.
    reach: the number of positions before and after its own that a token sees, in a model that is not causal; 0: all.
    framed: whether a token sees only the positions of its own frame, one of ``window`` absolute positions, a power of
        two, instead of the latest ones.
    norm_weights: whether the norms of queries and keys have weights.
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
    keys_are_values: bool = False
    value_scale: float = 1.0
    gated: bool = False
    head_gates: bool = False
    sinks: bool = False
    temperature: tuple[float, int, int] | None = None
    source: int | None = None
    n_in: int = 0
    hides_first: bool = False
    softcap: float = 0.0
    reach: int = 0
    framed: bool = False
    norm_weights: bool = True

    def cache_spec(self, rewind: int, decode_rows: int) -> AttentionCacheSpec:
        """The specification of the cache: keys and values."""
        sizes = self.n_head_kv, self.d_k, self.d_v
        return AttentionCacheSpec(*sizes, self.window, decode_rows, self.hides_first, self.framed)

    @property
    def most_owners(self) -> int:
        """The number of heads of keys and values."""
        return self.n_head_kv

    def part(self, owner: int, n_owners: int) -> "AttentionConfig":
        """Attention of some heads of keys and values, with the query heads that read them."""
        first, last = share(self.n_head_kv, owner, n_owners)
        return replace(self, n_head=self.n_head // self.n_head_kv * (last - first), n_head_kv=last - first)

    @property
    def row_elements(self) -> int:
        """An estimate of the number of elements per row of queries with gates, keys, values and results."""
        return self.n_head * (3 * self.d_k + self.d_v) + self.n_head_kv * (self.d_k + self.d_v)

    @property
    def memory_source(self) -> int | None:
        """The index of the layer whose keys and values are read, ``source``; None: the layer has its own."""
        return self.source

    @property
    def rotations(self) -> tuple[RopeConfig, ...]:
        """A tuple of ``rope``, or an empty tuple if there is no rotation."""
        return () if self.rope is None else (self.rope,)

    def scratch_bytes(self, scratch: Scratch, n_ctx: int, rows: int) -> int:
        """The memory in bytes for the results of chunks before they are joined."""
        return scratch.scratch_bytes(self.n_head, self.d_v, n_ctx)
