"""Several devices that share every layer of a model, as one backend (tensor parallelism, exact).

Each *owner* has some rows of every matrix, whole heads of attention and of delta nets, and the keys, values and states of its
heads.  A result of a product is therefore divided by columns, and the owners exchange columns where an operation needs whole
rows.  In a layer that happens four times::

    norm        whole rows, at every owner
    q, k, v     own rows of the matrices, which are those of own heads; attention of own heads
    exchange    the outputs of all heads
    output      own rows, added to own columns of the residual stream
    exchange    the residual stream
    norm        whole rows, at every owner
    gate, up    own rows; activation
    exchange    the activations
    down        own rows, added to own columns of the residual stream
    exchange    the residual stream

No sum is divided: every element of a result is computed by one owner, from the same numbers and in the same order as on a
single device.  So a model has the same bits, whatever the format of its weights and the number of owners.  A unit of
activations that are quantized together may lie in columns of two owners: then columns are exchanged as float32, and each
owner quantizes whole rows.

Models do not know of this.  An operation gets arrays that are whole or divided (``engine/group/values.py``), and asks for
what it needs.  Norms, embeddings and what a model keeps of rows are computed by every owner.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.cache.copies import Copies
from engine.cache.shared import OwnedArray, SharedLayer
from engine.compile.jobs import Job
from engine.group.values import Divided, SharedMatrix, Whole
from engine.ops.activation import Activation
from engine.ops.arithmetic import Arithmetic
from engine.ops.delta_net import DeltaNet
from engine.ops.device import DeviceMemory, DeviceOperations
from engine.ops.executor import Forward, SplitPass
from engine.ops.experts import Experts
from engine.ops.gathering import Gathering
from engine.ops.heads import Heads
from engine.ops.memory import Progress
from engine.ops.operations import Ops
from engine.ops.weight import Weight
from engine.shares import UNDIVIDED, Cut, HeadRows, even_cut, share

Value = Whole | Divided
"""An array, or a deferred result, of all owners."""


def _replicated(name: str) -> Any:
    """An operation on whole rows, which every owner computes."""

    def operation(self: "DeviceGroup", *given: Any, **named: Any) -> Any:
        return self._by_all(name, given, named)

    operation.__name__ = name
    operation.__doc__ = getattr(Arithmetic, name).__doc__
    return operation


class DeviceGroup:
    """The backend of a model whose layers several devices share.

    owners: their backends, all of one kind.  The first one, the *lead*, runs the passes, in which the operations of all of
    them are recorded, and returns the logits.
    """

    def __init__(self, owners: Sequence[Ops]) -> None:
        assert len(owners) > 1
        self.owners = tuple(owners)
        self.lead = owners[0]
        self.name = self.lead.name
        self.n_threads = self.lead.n_threads
        self.max_rows = min(ops.max_rows for ops in owners)
        self.decode_rows = min(ops.decode_rows for ops in owners)
        self.drafted_rows = min(ops.drafted_rows for ops in owners)
        self.decode_answers = min(ops.decode_answers for ops in owners)
        self.splits = self.lead.splits
        self._gathering = self.lead.gathering(self.owners)
        self._model: _SharedModel | None = None
        #: What the owners read of each other in the latest exchange.
        self._read: Sequence[Any] = ()
        #: Parameters that have been divided, by their identity, the cut and the axis.
        self._divided: dict[tuple[int, Cut, int], tuple[Whole, list[Any]]] = {}

    @property
    def _each(self) -> Iterator[tuple[int, Ops]]:
        """The owners with their numbers."""
        return enumerate(self.owners)

    # --- what each owner gets --------------------------------------------------------------------------------------

    def _own(self, value: Any, owner: int) -> Any:
        """An argument of an operation as an owner gets it, with whole rows."""
        if isinstance(value, (Whole, Divided)):
            return value.whole().copies[owner]
        if isinstance(value, (SharedMatrix, SharedLayer)):
            return value.parts[owner]
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(self._own(each, owner) for each in value)
        if is_dataclass(value) and not isinstance(value, type):
            old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
            new = {name: self._own(each, owner) for name, each in old.items()}
            return value if all(new[name] is old[name] for name in old) else replace(value, **new)
        return value

    def _by_all(self, name: str, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        results = [
            getattr(ops, name)(
                *(self._own(each, i) for each in given), **{key: self._own(each, i) for key, each in named.items()}
            )
            for i, ops in self._each
        ]
        return None if results[0] is None else Whole(results)

    def _part(self, x: Value, cut: Cut, owner: int) -> Any:
        """The columns of x [rows, n] of an owner."""
        if isinstance(x, Divided) and x.cut == cut:
            return x.parts[owner]
        copy, ops = x.whole().copies[owner], self.owners[owner]
        parts = [ops.columns(copy, first, last - first) for first, last in cut.runs[owner]]
        return parts[0] if len(parts) == 1 else ops.join_columns(parts)

    def _parameters(self, whole: Whole, cut: Cut, owner: int, axis: int = 0) -> Any:
        """The elements of a loaded vector of parameters, or the rows or columns of a loaded matrix, of an owner."""
        key = id(whole), cut, axis
        if key not in self._divided:
            assert whole.is_loaded, "only loaded parameters are divided"
            source, parts = self.lead.download(whole.copies[0]), []
            for ops, runs in zip(self.owners, cut.runs, strict=True):
                elements = np.concatenate([np.arange(*run) for run in runs])
                parts.append(ops.upload(np.ascontiguousarray(np.take(source, elements, axis))))
            self._divided[key] = whole, parts
        return self._divided[key][1][owner]

    def _with_cut(self, cut: Cut, parts: Sequence[Any]) -> Divided:
        return Divided(cut, parts, self.gathered)

    def gathered(self, x: Divided) -> Whole:
        """The columns of all owners, at every owner."""
        if (found := self._to_gather(x)) is not None:
            gathering, x = found
            return Whole(gathering.arrays(x.parts, x.cut))
        parts = [ops.plain(part) for ops, part in zip(self.owners, x.parts, strict=True)]
        self.lead.meet()
        # Until all have met again, an owner may be behind and still read the parts of this exchange.
        self._read = parts
        return Whole([self._joined(ops, x.cut, parts) for ops in self.owners])

    def _inputs(self, x: Value) -> Whole:
        """x as the input of products that all owners record next."""
        if (found := self._to_gather(x)) is None:
            return x.whole()
        gathering, x = found
        return Whole(gathering.inputs(x.parts, x.cut))

    def _to_gather(self, x: Value) -> tuple[Gathering, Divided] | None:
        """What brings the columns of x together, and x; None if x has all of them, or if owners wait for each other and then
        read."""
        gathering = self._gathering
        if gathering is None or not isinstance(x, Divided) or x.is_gathered or not gathering.takes(x.shape[0], x.cut):
            return None
        return gathering, x

    @staticmethod
    def _joined(ops: Ops, cut: Cut, parts: Sequence[Any]) -> Any:
        """The columns of all parts in their order, in the memory of one owner."""
        if all(len(runs) == 1 for runs in cut.runs):
            return ops.join_columns(parts)
        return ops.join_columns([ops.columns(parts[p.owner], p.at, p.size) for p in cut.pieces])

    # --- operations on whole rows ----------------------------------------------------------------------------------

    embed = _replicated("embed")
    layer_norm = _replicated("layer_norm")
    grouped_norm = _replicated("grouped_norm")
    rms_norm_add = _replicated("rms_norm_add")
    sparsify = _replicated("sparsify")
    places = _replicated("places")
    keep_rows = _replicated("keep_rows")
    beside = _replicated("beside")
    mtp_input = _replicated("mtp_input")
    per_layer_inputs = _replicated("per_layer_inputs")
    rows_before = _replicated("rows_before")
    columns = _replicated("columns")
    join_columns = _replicated("join_columns")
    spread_logits = _replicated("spread_logits")

    def rms_norm(self, x: Value, weight: Whole, eps: float) -> Whole:
        if (found := self._to_gather(x)) is None:
            return cast(Whole, self._by_all("rms_norm", (x, weight, eps), {}))
        gathering, x = found
        return Whole(gathering.normalized(x.parts, x.cut, weight.copies, eps))

    # --- operations on columns -------------------------------------------------------------------------------------

    def _by_column(self, arrays: Sequence[Value | None], compute: Callable[..., Any]) -> Value:
        """An operation on single elements, of arrays [rows, n].  It is divided if one of them is."""
        cut = next((x.cut for x in arrays if isinstance(x, Divided)), None)
        if cut is None:
            return Whole([compute(ops, *(self._own(x, i) for x in arrays)) for i, ops in self._each])
        parts = [compute(ops, *(None if x is None else self._part(x, cut, i) for x in arrays)) for i, ops in self._each]
        return self._with_cut(cut, parts)

    def plain(self, x: Value) -> Value:
        return self._by_column([x], lambda ops, x: ops.plain(x))

    def scale(self, x: Value, factor: float) -> Value:
        return self._by_column([x], lambda ops, x: ops.scale(x, factor))

    def softcap(self, x: Value, cap: float) -> Value:
        return self._by_column([x], lambda ops, x: ops.softcap(x, cap))

    def activate(self, activation: Activation, gate: Value | None, up: Value) -> Value:
        return self._by_column([gate, up], lambda ops, gate, up: ops.activate(activation, gate, up))

    def add(self, x: Value, y: Value, scale: float = 1.0) -> Value:
        if len(y.shape) == len(x.shape):
            return self._by_column([x, y], lambda ops, x, y: ops.add(x, y, scale))
        if not isinstance(x, Divided):
            return cast(Whole, self._by_all("add", (x, y, scale), {}))
        bias = y.whole()
        parts = (ops.add(x.parts[i], self._parameters(bias, x.cut, i), scale) for i, ops in self._each)
        return self._with_cut(x.cut, list(parts))

    # --- products --------------------------------------------------------------------------------------------------

    def matmul(self, x: Value, *weights: SharedMatrix) -> list[Value]:
        whole = self._inputs(x)
        outputs = [ops.matmul(whole.copies[i], *(weight.parts[i] for weight in weights)) for i, ops in self._each]
        columns = zip(weights, zip(*outputs, strict=True), strict=True)
        return [self._of_cut(weight.cut, parts) for weight, parts in columns]

    def matmul_add(self, residual: Value, x: Value, weight: SharedMatrix, bias: Whole | None = None) -> Value:
        cut = weight.cut
        if cut is None:
            return cast(Whole, self._by_all("matmul_add", (residual, x, weight, bias), {}))
        whole = self._inputs(x)
        parts = [
            ops.matmul_add(
                self._part(residual, cut, i),
                whole.copies[i],
                weight.parts[i],
                None if bias is None else self._parameters(bias, cut, i),
            )
            for i, ops in self._each
        ]
        return self._with_cut(cut, parts)

    # --- mixtures --------------------------------------------------------------------------------------------------

    def experts(
        self,
        experts: Experts[Whole, SharedMatrix],
        residual: Value | None,
        x: Value,
        router_x: Value | None = None,
        tokens: Whole | None = None,
    ) -> Value:
        """Each owner chooses experts, and has some rows of the matrices of every one."""
        whole = cast(Whole, self.plain(x.whole()))
        seen = whole if router_x is None else router_x.whole()
        rows, indices = replace(experts, shared=None), range(len(self.owners))
        own = [self._own_experts(rows, i) for i in indices]
        chosen = [ops.choose_experts(own[i], seen.copies[i], self._own(tokens, i)) for i, ops in self._each]
        hidden = [ops.activate_experts(own[i], whole.copies[i], chosen[i].ids) for i, ops in self._each]
        full = self._of_cut(experts.up.cut, hidden).whole()
        given = [(chosen[i].ids, chosen[i].weights) for i in indices]
        sums = [ops.join_experts(own[i], full.copies[i], *given[i]) for i, ops in self._each]
        total = self._of_cut(experts.down.cut, sums)
        if experts.shared is not None:
            gate, up, down = experts.shared
            products = self.matmul(whole, *([] if gate is None else [gate]), up)
            (y,) = self.matmul(self.activate(experts.common, None if gate is None else products[0], products[-1]), down)
            if experts.shared_gated:
                logits = Whole([each.logits for each in chosen])
                total = self._add_gated(total, y, logits)
            else:
                total = self.add(total, y)
        return total if residual is None else self.add(residual, total)

    def _add_gated(self, x: Value, y: Value, gates: Whole) -> Value:
        if not isinstance(x, Divided):
            return cast(Whole, self._by_all("add_gated", (x, y, gates), {}))
        return self._with_cut(
            x.cut, [ops.add_gated(x.parts[i], self._part(y, x.cut, i), gates.copies[i]) for i, ops in self._each]
        )

    def _of_cut(self, cut: Cut | None, parts: Sequence[Any]) -> Value:
        return Whole(parts) if cut is None else self._with_cut(cut, parts)

    def _own_experts(self, experts: Experts[Whole, SharedMatrix], owner: int) -> Experts[Any, Any]:
        """The experts with the rows of an owner, and the elements of their biases that belong to them."""

        def biases(of: Whole | None, matrix: SharedMatrix | None) -> Any:
            if of is None or matrix is None or matrix.cut is None:
                return self._own(of, owner)
            return self._parameters(of, matrix.cut, owner, axis=1)

        return replace(
            cast(Experts[Any, Any], self._own(experts, owner)),
            gate_bias=biases(experts.gate_bias, experts.gate),
            up_bias=biases(experts.up_bias, experts.up),
            down_bias=biases(experts.down_bias, experts.down),
        )

    # --- mixers ----------------------------------------------------------------------------------------------------

    def _heads(self, n: int, width: int) -> Cut:
        """The cut of a row of n heads, or groups of heads, of ``width`` elements."""
        return HeadRows(n, (n * width,)).cut(len(self.owners))

    def _own_heads(self, heads: Heads[Whole]) -> Iterator[Heads[Any]]:
        """The parameters of the heads of each owner."""
        n, group = heads.n_head_kv, heads.n_head // heads.n_head_kv
        sizes = (group * heads.d_k * (2 if heads.gated else 1), heads.d_k, heads.d_v)
        cuts = [self._heads(n, size) for size in sizes]
        rest = replace(heads, biases=None, sinks=None)
        for i in range(len(self.owners)):
            first, last = share(n, i, len(self.owners))
            yield replace(
                self._own(rest, i),
                n_head=group * (last - first),
                n_head_kv=last - first,
                biases=None
                if heads.biases is None
                else tuple(self._parameters(b, cut, i) for b, cut in zip(heads.biases, cuts, strict=True)),
                sinks=None if heads.sinks is None else self._parameters(heads.sinks, self._heads(n, group), i),
            )

    def _of_heads(self, heads: Heads[Whole], x: Value, owner: int) -> Any:
        """The columns of queries, keys or values of an owner's heads."""
        return self._part(x, self._heads(heads.n_head_kv, x.shape[1] // heads.n_head_kv), owner)

    def _results(self, heads: Heads[Whole], parts: Sequence[Any]) -> Divided:
        return self._with_cut(self._heads(heads.n_head_kv, heads.n_head // heads.n_head_kv * heads.d_v), parts)

    def attention(
        self,
        heads: Heads[Whole],
        q: Value,
        k: Value,
        v: Value,
        cache: SharedLayer,
        batch: Batch[Whole],
        table: Whole | None,
    ) -> Divided:
        parts = []
        for i, (ops, own) in enumerate(zip(self.owners, self._own_heads(heads), strict=True)):
            queries, keys = self._of_heads(heads, q, i), self._of_heads(heads, k, i)
            values = keys if v is k else self._of_heads(heads, v, i)
            rest = (self._own(each, i) for each in (cache, batch, table))
            parts.append(ops.attention(own, queries, keys, values, *rest))
        return self._results(heads, parts)

    def attend_past(
        self,
        heads: Heads[Whole],
        q: Value,
        cache: SharedLayer,
        batch: Batch[Whole],
        last: Whole,
        table: Whole | None,
        window: int,
        spans: bool = False,
    ) -> Divided:
        parts = []
        for i, (ops, own) in enumerate(zip(self.owners, self._own_heads(heads), strict=True)):
            queries, pages, rows = self._of_heads(heads, q, i), self._own(cache, i), self._own(batch, i)
            rest = self._own(last, i), self._own(table, i), window, spans
            parts.append(ops.attend_past(own, queries, pages, rows, *rest))
        return self._results(heads, parts)

    def remember(
        self, heads: Heads[Whole], k: Value, v: Value, cache: SharedLayer, batch: Batch[Whole], table: Whole | None
    ) -> None:
        for i, (ops, own) in enumerate(zip(self.owners, self._own_heads(heads), strict=True)):
            keys = self._of_heads(heads, k, i)
            values = keys if v is k else self._of_heads(heads, v, i)
            ops.remember(own, keys, values, *(self._own(each, i) for each in (cache, batch, table)))

    def gate_heads(self, x: Value, gates: Value) -> Value:
        if not isinstance(gates, Divided):
            return cast(Whole, self._by_all("gate_heads", (x, gates), {}))
        cut = gates.cut.times(x.shape[1] // gates.shape[1])
        parts = [ops.gate_heads(self._part(x, cut, i), gates.parts[i]) for i, ops in self._each]
        return self._with_cut(cut, parts)

    def delta_net(
        self, net: DeltaNet[Whole], x: Value, gates: Sequence[Value], memory: SharedLayer, batch: Batch[Whole]
    ) -> Divided:
        n, keys, d = len(self.owners), (net.n_k, net.n_k), net.state_size
        values = HeadRows(net.n_k, net.value_segments).cut(n)
        channels = HeadRows(net.n_k, (*keys, *net.value_segments)).cut(n).times(d)
        several = HeadRows(net.n_k, net.value_segments * 2).cut(n) if len(gates) == 1 else values
        parts = []
        for i, ops in self._each:
            first, last = share(net.n_k, i, n)
            own = replace(
                cast(DeltaNet[Any], self._own(net, i)),
                n_k=last - first,
                n_v=values.counts[i],
                conv1d=self._parameters(net.conv1d, channels, i),
                a=self._parameters(net.a, values, i),
                dt=self._parameters(net.dt, values, i),
            )
            of_gates = [self._part(gate, several, i) for gate in gates]
            states, rows = self._own(memory, i), self._own(batch, i)
            parts.append(ops.delta_net(own, self._part(x, channels, i), of_gates, states, rows))
        return self._with_cut(values.times(d), parts)

    def gated_norm(self, x: Value, weight: Whole, gate: Value, eps: float, swish: bool = True) -> Value:
        if not isinstance(x, Divided):
            return cast(Whole, self._by_all("gated_norm", (x, weight, gate, eps, swish), {}))
        parts = [
            ops.gated_norm(x.parts[i], weight.copies[i], self._part(gate, x.cut, i), eps, swish)
            for i, ops in self._each
        ]
        return self._with_cut(x.cut, parts)

    # --- memory ----------------------------------------------------------------------------------------------------

    def weight(self, weight: Weight, host: bool = False) -> SharedMatrix:
        """A matrix whose rows are divided by heads, if it has any, or evenly; as a whole for each owner if it is small.  Of
        stacked matrices, each is divided in the same way.  If ``host`` is true, all owners read it in host memory."""
        n, heads, rows = len(self.owners), weight.heads, weight.rows // weight.stack
        if host:
            return SharedMatrix(weight.name, weight.rows, weight.columns, None, [self.lead.weight(weight, host)] * n)
        cut = None
        if heads is not UNDIVIDED:
            cut = even_cut(rows, n) if heads is None else heads.cut(n)
        if cut is None:
            parts = [ops.weight(weight) for ops in self.owners]
        elif weight.stack > 1:
            parts = [ops.weight(weight.of_each(*run)) for ops, (run,) in zip(self.owners, cut.runs, strict=True)]
        else:
            parts = [ops.weight(weight.of(runs)) for ops, runs in zip(self.owners, cut.runs, strict=True)]
        return SharedMatrix(weight.name, weight.rows, weight.columns, cut, parts)

    def upload(self, array: np.ndarray) -> Whole:
        return Whole([ops.upload(array) for ops in self.owners], is_loaded=True)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Whole:
        return Whole([ops.zeros(shape, dtype) for ops in self.owners])

    def store(self, target: Whole | OwnedArray, first: int, rows: np.ndarray) -> None:
        if isinstance(target, OwnedArray):
            self.owners[target.owner].store(target.array, first, rows)
            return
        for ops, copy in zip(self.owners, target.copies, strict=True):
            ops.store(copy, first, rows)

    def download(self, array: Value | OwnedArray, out: np.ndarray | None = None) -> np.ndarray:
        if isinstance(array, OwnedArray):
            return self.owners[array.owner].download(array.array, out)
        return self.lead.download(array.whole().copies[0], out)

    def begin_download(self, pairs: Sequence[tuple[Value | OwnedArray, np.ndarray]]) -> Sequence[Copies]:
        given = defaultdict[int, list[tuple[Any, np.ndarray]]](list)
        for array, out in pairs:
            if isinstance(array, OwnedArray):
                given[array.owner].append((array.array, out))
            else:
                given[0].append((array.whole().copies[0], out))
        return [copies for owner, own in given.items() for copies in self.owners[owner].begin_download(own)]

    def free_memory(self, weights: int) -> int:
        """That of all owners together, if each has as much as the one with the least; on the CPU they have the same."""
        if self.lead.device_memory() is None:
            return self.lead.free_memory(weights)
        n = len(self.owners)
        return n * min(ops.free_memory(weights // n) for ops in self.owners)

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        return self.lead.scratch_bytes(n_head, d_v, n_ctx)

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        return self.lead.latent_scratch_bytes(n_head, rank, n_ctx, rows)

    def product_bytes(self, rows: int, columns: int) -> int:
        return self.lead.product_bytes(rows, columns)

    def buffer_bytes(self) -> int:
        return sum(ops.buffer_bytes() for ops in self.owners)

    def host_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return self.lead.host_array(shape, dtype)

    def host_side(self) -> None:
        """None: its parts are on one stage."""

    def exchange(self, borders: int, rows: int, width: int, n_used: int = 0) -> None:
        """None: it has no borders with the host."""

    def weight_stream(self, parts: Sequence[Any]) -> None:
        """None: its weights stay where they are."""

    def stream_bytes(self, parts: Sequence[int]) -> int:
        return 0

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        for ops in self.owners:
            ops.loading(tensors, progress if ops is self.lead else None)

    def load_jobs(self) -> list[Job]:
        return list(dict.fromkeys(job for ops in self.owners for job in ops.load_jobs()))

    def loaded(self) -> None:
        for ops in self.owners:
            ops.loaded()

    def stop_loading(self) -> None:
        for ops in self.owners:
            ops.stop_loading()

    # --- passes ----------------------------------------------------------------------------------------------------

    def recording(self) -> AbstractContextManager[None]:
        """A context in which the operations of all owners are recorded into the pass of the lead."""
        return self.lead.together(self.owners[1:])

    def begin(self, rows: int) -> None:
        """Another pass of so many rows is recorded from now on."""
        if self._gathering is not None:
            self._gathering.begin(rows)

    def end(self) -> None:
        """The pass has been recorded: let it end, and keep none of its arrays."""
        if self._gathering is not None:
            self._gathering.end()
        self._read = ()

    def batch(self, batch: Batch[Any]) -> Batch[Whole]:
        """The rows of a pass, which are in the memory of the lead, copied to that of every owner."""
        each = [batch, *(ops.own_rows(batch) for ops in self.owners[1:])]
        copies = {field.name: [getattr(own, field.name) for own in each] for field in fields(batch)}
        arrays: dict[str, Any] = {name: Whole(own) for name, own in copies.items() if hasattr(own[0], "shape")}
        return replace(batch, **arrays)

    def of_lead(self, result: Value) -> Any:
        """The result of a pass, in the memory of the lead."""
        if isinstance(result, Whole):
            return result.copies[0]
        parts = [ops.plain(part) for ops, part in zip(self.owners, result.parts, strict=True)]
        self.lead.meet()
        return self._joined(self.lead, result.cut, parts)

    def inputs(self) -> Batch[Any] | None:
        return self.lead.inputs()

    def of_all(self, forward: Forward[Any]) -> Forward[Any]:
        """A pass of the group as a pass of its lead, equal for equal passes."""
        return _Together(self, forward)

    def run(
        self,
        forward: Forward[Any],
        batch: Batch[np.ndarray],
        n_logits: int,
        inputs: Batch[Any] | None = None,
        most: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray | None:
        return self.lead.run(self.of_all(forward), batch, n_logits, inputs, most, out)

    def split(
        self, forward: Forward[Any], batch: Batch[np.ndarray], n_logits: int, most: int = 0, at_once: bool = False
    ) -> SplitPass:
        return self.lead.split(self.of_all(forward), batch, n_logits, most, at_once)

    def many_answers(self, weights: Mapping[str, int]) -> int:
        return self.lead.many_answers(weights)

    def next_rows(self, left: int, most: int, beside: bool = False) -> int:
        return self.lead.next_rows(left, most, beside)

    def padded_rows(self, rows: int, mixed: bool) -> int:
        return self.lead.padded_rows(rows, mixed)

    def jobs(self, model: Any) -> list[Job]:
        return self.lead.jobs(self._of_lead(model))

    def warm_up(self, model: Any) -> None:
        self.lead.warm_up(self._of_lead(model))

    def _of_lead(self, model: Any) -> Any:
        """A model as the lead records it, the same object for each call with this model."""
        if self._model is None or self._model.model is not model:
            self._model = _SharedModel(self, model)
        return self._model

    def pass_jobs(self, forward: Forward[Any], most: int = 1) -> list[Job]:
        return self.lead.pass_jobs(self.of_all(forward), most)

    def load_pass(self, forward: Forward[Any], most: int = 1) -> None:
        self.lead.load_pass(self.of_all(forward), most)

    def expect_drafts(self) -> None:
        for ops in self.owners:
            ops.expect_drafts()

    # --- the devices -----------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The names of the devices, such as "cpu + cpu"."""
        return " + ".join(ops.label for ops in self.owners)

    @property
    def gpu_name(self) -> str:
        """The name of the first GPU; "" for the CPU."""
        return self.lead.gpu_name

    def device_memory(self) -> DeviceMemory | None:
        """The sums of all owners."""
        found = [memory for ops in self.owners if (memory := ops.device_memory()) is not None]
        sums = (sum(getattr(memory, name) for memory in found) for name in ("allocated", "weights", "free"))
        return DeviceMemory(*sums) if found else None

    def bandwidth(self) -> float:
        """That of all owners together; on the CPU they have the same."""
        if self.lead.device_memory() is None:
            return self.lead.bandwidth()
        return sum(ops.bandwidth() for ops in self.owners)

    def shares_memory_with(self, other: DeviceOperations) -> bool:
        """Whether it is this group."""
        return other is self

    def can_reach(self, other: DeviceOperations) -> bool:
        """Whether it is this group."""
        return other is self


@dataclass(frozen=True)
class _Together:
    """A pass of a group as a pass of its lead."""

    group: DeviceGroup
    forward: Forward[Any]

    def __call__(self, batch: Batch[Any], n_logits: int) -> Any:
        self.group.begin(batch.rows)
        with self.group.recording():
            result = self.forward(self.group.batch(batch), n_logits)
            found = None if result is None else self.group.of_lead(result)
            self.group.end()
        return found


class _SharedModel:
    """A model of a group as the lead records it (``engine.ops.model.AnyModel``)."""

    def __init__(self, group: DeviceGroup, model: Any) -> None:
        self.model = model
        self.compute = _Together(group, model.compute)
        self.compute_kinds = _Together(group, model.compute_kinds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)
