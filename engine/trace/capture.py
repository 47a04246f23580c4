"""A pass over one token that also returns what its layers compute on the way.

The layers of a model call the operations of a backend.  Here they call :class:`WatchedOperations`, which passes every call on
and keeps some of the arrays.  The pass is recorded and run like any other.  Its result is a single row: the logits, and then
everything that was kept.  The only additional operations copy values or choose experts once more, so the logits have the bits
of any other pass.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from engine.arrays import Array, Batch, Matrix, Value
from engine.cache.kv import AttentionCache
from engine.cache.recurrent import RecurrentCache
from engine.models.base import Model
from engine.ops.delta_net import DeltaNet
from engine.ops.experts import Experts
from engine.ops.heads import Heads
from engine.ops.operations import Ops

EMBEDDING = -1
"""The layer of what is kept before the first layer."""


@dataclass(frozen=True)
class Kept:
    """A part of the row that a traced pass returns.

    layer: the index of the layer, or ``EMBEDDING``.
    name: "stream", the residual stream after a part of the layer; "query", the queries of attention before their bias, norm
        and rotation; "experts" and "weights" of a mixture.
    begin, end: its columns.
    """

    layer: int
    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of attention, besides the query: the parameters of the heads, the cache, the table of rotation angles
    [n_ctx, 2, n_rot / 2] or None, and the window as ``engine/cache/window.py`` defines it."""

    heads: Heads[Array]
    cache: AttentionCache[Array]
    table: Array | None
    window: int


class TracedPass:
    """The pass of a model over one row.  After its first run, the attributes describe the row that it returns.

    Attributes: ``kept``, the parts after the logits; ``asked``, the arguments of attention by layer; ``nets``, the delta net
    and its cache by layer.
    """

    def __init__(self, model: Model) -> None:
        """model: a model on one device."""
        self.kept: list[Kept] = []
        self.asked: dict[int, AttentionArguments] = {}
        self.nets: dict[int, tuple[DeltaNet[Array], RecurrentCache[Array]]] = {}
        self._ops = model.ops
        self._watched = cast(Ops, WatchedOperations(self))
        self._arrays: list[Array] = []
        self._layer = EMBEDDING
        # A pass of this copy goes through the layers in another way; everything else is that of the model.
        self._model = copy.copy(model)
        vars(self._model).update(embed=partial(self._embed, model), block=partial(self._block, model))

    def __call__(self, batch: Batch[Array], n_logits: int) -> Array:
        """The operations of the pass (``engine.ops.executor.Forward``).  Returns float32 [1, n]."""
        self.kept, self._arrays = [], []
        logits = self._model.compute(batch, n_logits)
        assert logits is not None
        row = self._ops.join_columns([logits, *self._arrays])
        self._arrays = []
        return row

    def keep(self, name: str, array: Array) -> None:
        """Append an array [1, ...] of 4-byte elements to the row."""
        begin = self.kept[-1].end if self.kept else self._model.config.n_vocab
        self.kept.append(Kept(self._layer, name, begin, begin + array.size))
        self._arrays.append(array.reshape(1, array.size))

    def ask(self, asked: AttentionArguments, query: Array) -> None:
        """Keep a query and the other arguments of attention."""
        self.asked[self._layer] = asked
        # A copy, because a backend may rotate it in place.
        self.keep("query", self._ops.join_columns([query.reshape(1, query.size)]))

    def remember_net(self, net: DeltaNet[Array], memory: RecurrentCache[Array]) -> None:
        """Keep the arguments of a delta net that tell its state."""
        self.nets[self._layer] = net, memory

    def _embed(self, model: Model, batch: Batch[Array]) -> Array:
        self._layer = EMBEDDING
        x = model.embed(batch)
        self.keep("stream", x)
        return x

    def _block(self, model: Model, il: int, x: Array, batch: Batch[Array]) -> Array:
        self._layer = il
        for part in model.parts[il]:
            x = (model.mix if part.mixer else model.feed)(self._watched, il, x, batch)
            self.keep("stream", x)
        return x


class WatchedOperations:
    """The operations of a backend, some of whose arguments a traced pass keeps."""

    def __init__(self, traced: TracedPass) -> None:
        self._traced = traced
        self._ops: Any = traced._ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attention(
        self,
        heads: Heads[Array],
        q: Array,
        k: Array,
        v: Array,
        cache: AttentionCache[Array],
        batch: Batch[Array],
        table: Array | None,
    ) -> Value:
        """``Arithmetic.attention``."""
        self._traced.ask(AttentionArguments(heads, cache, table, cache.window), q)
        return cast(Value, self._ops.attention(heads, q, k, v, cache, batch, table))

    def attend_past(
        self,
        heads: Heads[Array],
        q: Array,
        cache: AttentionCache[Array],
        batch: Batch[Array],
        last: Array,
        table: Array | None,
        window: int,
        spans: bool = False,
    ) -> Value:
        """``Arithmetic.attend_past``."""
        self._traced.ask(AttentionArguments(heads, cache, table, window), q)
        return cast(Value, self._ops.attend_past(heads, q, cache, batch, last, table, window, spans))

    def delta_net(
        self,
        net: DeltaNet[Array],
        x: Array,
        gates: list[Array],
        memory: RecurrentCache[Array],
        batch: Batch[Array],
    ) -> Array:
        """``Arithmetic.delta_net``."""
        self._traced.remember_net(net, memory)
        return cast(Array, self._ops.delta_net(net, x, gates, memory, batch))

    def experts(
        self,
        experts: Experts[Array, Matrix],
        residual: Array | None,
        x: Value,
        router_x: Value | None = None,
        tokens: Array | None = None,
    ) -> Array:
        """``Arithmetic.experts``."""
        ops = self._ops
        x = ops.plain(x)  # it is used twice
        router_x = None if router_x is None else ops.plain(router_x)
        chosen = ops.choose_experts(experts, x if router_x is None else router_x, tokens)
        self._traced.keep("experts", ops.reinterpret(chosen.ids, np.float32))
        self._traced.keep("weights", chosen.weights)
        return cast(Array, ops.experts(experts, residual, x, router_x, tokens))
