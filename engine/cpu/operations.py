"""The operations of a pass on the CPU: which kernels compute them, on which items.

``engine/ops/arithmetic.py`` describes the operations.  Arrays are NumPy arrays; an operation returns a new one unless it is
described as "in place".  Times of items, in nanoseconds, only decide how many items a thread takes at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.arrays import Batch
from engine.cache.kv import AttentionCache
from engine.cache.recurrent import RecurrentCache
from engine.cpu import add, delta_net, embed, glu, mtp, per_layer, rms_norm, rope, softcap
from engine.cpu.compressed_operations import CompressedOperations
from engine.cpu.products import dense, matmul, quantize, router
from engine.cpu.products import experts as mixture
from engine.cpu.products.repack import Matrix, Records
from engine.cpu.simd import host
from engine.ops.activation import Activation
from engine.ops.delta_net import DeltaNet
from engine.ops.experts import GATINGS, Experts, Routing, present
from engine.ops.heads import Heads

f32 = np.float32

HOST = host()
"""The instruction set that kernels are made for."""


class Pairs(NamedTuple):
    """Pairs of a row and one of its experts, grouped by expert (``engine/cpu/products/experts.py``).

    order int32 [pairs]; used int32 [most groups]; starts int32 [most groups + 1]; n_groups int32 [1].
    """

    order: np.ndarray
    used: np.ndarray
    starts: np.ndarray
    n_groups: np.ndarray


_NOTHING = np.zeros((0, 0), f32)
_NO_WEIGHTS = np.zeros(0, f32)
_NO_IDS, _NO_TABLE = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)

Quantized = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows as products take them: int8 [rows, K], scales float32 [rows, K / unit], sums of 16 int16 [rows, K / 16]."""


class PassOperations(CompressedOperations):
    """The operations that forward passes are written against (``engine/ops/arithmetic.py``)."""

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._drafts = False

    # --- embedding and products --------------------------------------------------------------------------------

    def embed(self, table: Matrix, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        out = self.empty((tokens.size, table.columns))
        if isinstance(table, Records):
            kernel, data = embed.embed_records(table.format.name), table.data[0]
        else:
            kernel, data = embed.embed_rows(table.format.name), table.data
        self.do(kernel, data, tokens, f32(scale), out, items=tokens.size, ns=10.0 * table.columns)
        return out

    def matmul(self, x: np.ndarray, *weights: Matrix) -> list[np.ndarray]:
        return self._products(x, _NOTHING, *weights)

    def matmul_add(
        self, residual: np.ndarray, x: np.ndarray, weight: Matrix, bias: np.ndarray | None = None
    ) -> np.ndarray:
        if bias is None:
            return self._products(x, residual, weight)[0]
        (y,) = self.matmul(x, weight)
        return self.add(residual, self.add(y, bias))

    def _products(self, x: np.ndarray, residual: np.ndarray, *weights: Matrix) -> list[np.ndarray]:
        rows, columns = x.shape
        units = {weight.format.unit for weight in weights if isinstance(weight, Records)}
        quantized = {unit: self._quantize(x, unit) for unit in sorted(units)}
        # Kernels for many rows may take two groups of weight rows at once.
        pairs = 2 if rows > 1 else 1
        some = matmul.matmul_few if rows <= matmul.FEW and self._drafts else matmul.matmul_rows
        product = matmul.matmul_step if rows == 1 else some
        outputs = []
        for i, weight in enumerate(weights):
            out = self.empty((rows, weight.rows))
            if isinstance(weight, Records):
                kernel = product(weight.format.name, HOST)
                given = weight.data[0], *quantized[weight.format.unit], residual, out
                items = weight.data.shape[1]
                self.do(kernel, *given, items=items, ns=rows * columns / 8.0, joined=i > 0, multiple=pairs)
            else:
                kernel = dense.matmul_float(weight.format.name)
                self.do(kernel, weight.data, x, residual, out, items=weight.rows, ns=rows * columns / 8.0, joined=i > 0)
            outputs.append(out)
        return outputs

    def _quantize(self, x: np.ndarray, unit: int) -> Quantized:
        rows, columns = x.shape
        q = self.empty((rows, columns), np.int8)
        d = self.empty((rows, columns // unit))
        s = self.empty((rows, columns // 16), np.int16)
        self.do(quantize.quantize_rows, x, unit, q, d, s, items=d.size, ns=unit / 4)
        return q, d, s

    def add(self, x: np.ndarray, y: np.ndarray, scale: float = 1.0) -> np.ndarray:
        if scale == 1.0:
            return self._add(x, y)
        z, n = self.empty(x.shape), x.shape[-1]
        given = x.reshape(-1, n), y.reshape(-1, n), f32(scale), z.reshape(-1, n)
        self.do(add.add_scaled, *given, items=x.size // n, ns=0.1 * n)
        return z

    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        z = self.empty(x.shape)
        self.do(add.scale, x.reshape(-1), f32(factor), z.reshape(-1), items=x.size, ns=0.1, multiple=64)
        return z

    def _add(self, x: np.ndarray, y: np.ndarray, joined: bool = False) -> np.ndarray:
        z = self.empty(x.shape)
        if y.size == x.size:
            given = x.reshape(-1), y.reshape(-1), z.reshape(-1)
            self.do(add.add, *given, items=x.size, ns=0.1, joined=joined, multiple=64)
        else:
            n = y.size
            self.do(add.add_bias, x.reshape(-1, n), y, z.reshape(-1, n), items=x.size // n, ns=0.1 * n, joined=joined)
        return z

    # --- norms and gates ---------------------------------------------------------------------------------------

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [..., n], weight [n] or [0] for ones; float32 [..., n]."""
        return self._norm(x, weight, eps)

    def _norm(self, x: np.ndarray, weight: np.ndarray, eps: float, joined: bool = False) -> np.ndarray:
        y, n = self.empty(x.shape), x.shape[-1]
        given = x.reshape(-1, n), weight, f32(eps), y.reshape(-1, n)
        self.do(rms_norm.rms_norm, *given, items=x.size // n, ns=20 + 0.3 * n, joined=joined)
        return y

    def rms_norm_add(
        self, residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0
    ) -> np.ndarray:
        y, n = self.empty(x.shape), weight.size
        given = residual, x, weight, f32(eps), f32(scale), y
        self.do(rms_norm.rms_norm_add, *given, items=x.shape[0], ns=20 + 0.3 * n)
        return y

    def per_layer_inputs(
        self, m: np.ndarray, e: np.ndarray, weight: np.ndarray, scale: float, eps: float
    ) -> np.ndarray:
        rows, n = m.shape[0], weight.size
        out = self.empty((m.shape[1] // n, rows, n))
        given = m, e, weight, f32(scale), f32(eps), out
        self.do(per_layer.per_layer_inputs, *given, items=out.shape[0] * rows, ns=20 + 0.5 * n)
        return out

    def activate(self, activation: Activation, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        y, gate = self.empty(up.shape), up if gate is None else gate
        given = gate.reshape(-1), up.reshape(-1), *map(f32, activation.numbers), y.reshape(-1)
        self.do(glu.activate(activation.kind), *given, items=y.size, ns=0.5, multiple=64)
        return y

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        self.do(softcap.softcap, x.reshape(-1), f32(cap), items=x.size, ns=0.5, multiple=64)
        return x

    def gated_norm(self, x: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
        y, n = self.empty(x.shape), weight.size
        given = x.reshape(-1, n), weight, gate.reshape(-1, n), f32(eps), y.reshape(-1, n)
        self.do(delta_net.gated_norm, *given, items=x.size // n, ns=20 + 1.5 * n)
        return y

    # --- attention ---------------------------------------------------------------------------------------------

    def attention(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        table: np.ndarray | None,
    ) -> np.ndarray:
        both = q.reshape(-1, 2, heads.d_k) if heads.gated else None
        if both is not None:
            q = self.empty((batch.rows, heads.n_head * heads.d_k))
            self.do(glu.ungated, both, q.reshape(-1, heads.d_k), items=both.shape[0], ns=0.1 * heads.d_k)
        queries, k, v = self._prepared(heads, [q, k, v], batch, table)
        slots = self.slots_of(batch)
        self.append(cache, k, v, batch.positions, slots)
        out = self.attend(queries, cache, batch.positions, heads.scale, sinks=heads.sinks, sequences=slots)
        if both is not None:
            self.do(glu.sigmoid_gate, out.reshape(-1, heads.d_v), both, items=both.shape[0], ns=1.0 * heads.d_v)
        return out

    def attend_past(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        last: np.ndarray,
        table: np.ndarray | None,
        window: int,
    ) -> np.ndarray:
        (queries,) = self._prepared(heads, [q], batch, table)
        return self.attend(queries, cache, last, heads.scale, window, heads.sinks, self.slots_of(batch))

    def _prepared(
        self, heads: Heads[np.ndarray], given: list[np.ndarray], batch: Batch[np.ndarray], table: np.ndarray | None
    ) -> list[np.ndarray]:
        """Queries, keys or values with biases, normalized, and rotated by position unless they are values: [rows, heads, d]
        each; queries times the factors of their positions.  given: q; k and v; or all three.  What is done to one of them
        does not depend on the others, so each step is one stage."""
        here = {1: "q", 2: "kv", 3: "qkv"}[len(given)]
        if heads.biases is not None:
            biases = dict(zip("qkv", heads.biases, strict=True))
            given = [self._add(x, biases[name], i > 0) for i, (name, x) in enumerate(zip(here, given, strict=True))]
        n, d = {"q": heads.n_head}, {"v": heads.d_v}
        parts = {
            name: x.reshape(batch.rows, n.get(name, heads.n_head_kv), d.get(name, heads.d_k))
            for name, x in zip(here, given, strict=True)
        }
        if not heads.norm_after:
            self._normalize(heads, parts)
        if table is not None:
            for i, name in enumerate(here.replace("v", "")):
                parts[name] = self._rotate(parts[name], batch.positions, table, heads.neox, i > 0)
        if heads.norm_after:
            self._normalize(heads, parts)
        if heads.query_scales is not None and "q" in parts:
            q = parts["q"]
            parts["q"], items = self.empty(q.shape), q.shape[0] * q.shape[1]
            given_q = q, batch.positions, heads.query_scales, parts["q"]
            self.do(rope.scale_by_position, *given_q, items=items, ns=0.1 * q.shape[2])
        return list(parts.values())

    def _normalize(self, heads: Heads[np.ndarray], parts: dict[str, np.ndarray]) -> None:
        """Replace queries, keys or values [rows, heads, d] by normalized ones, each head by itself."""
        norms = {"q": heads.q_norm, "k": heads.k_norm, "v": _NO_WEIGHTS if heads.v_normed else None}
        used = [(name, norm) for name in parts if (norm := norms[name]) is not None]
        for i, (name, norm) in enumerate(used):
            parts[name] = self._norm(parts[name], norm, heads.eps, i > 0)

    def remember(
        self,
        heads: Heads[np.ndarray],
        k: np.ndarray,
        v: np.ndarray,
        cache: AttentionCache[np.ndarray],
        batch: Batch[np.ndarray],
        table: np.ndarray | None,
    ) -> None:
        k, v = self._prepared(heads, [k, v], batch, table)
        self.append(cache, k, v, batch.positions, self.slots_of(batch))

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
        """Rotate x [rows, heads, head_dim] by its positions, in place; returns x."""
        items, d = x.shape[0] * x.shape[1], x.shape[2]
        self.do(rope.rope, x, positions, table, neox, x, items=items, ns=0.5 * d)
        return x

    def _rotate(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool, joined: bool) -> np.ndarray:
        y = self.empty(x.shape)
        items, d = x.shape[0] * x.shape[1], x.shape[2]
        self.do(rope.rope, x, positions, table, neox, y, items=items, ns=0.5 * d, joined=joined)
        return y

    # --- delta nets --------------------------------------------------------------------------------------------

    def delta_net(
        self,
        net: DeltaNet[np.ndarray],
        x: np.ndarray,
        gates: Sequence[np.ndarray],
        memory: RecurrentCache[np.ndarray],
        batch: Batch[np.ndarray],
    ) -> np.ndarray:
        rows, d = batch.rows, net.state_size
        places = batch.positions, self.slots_of(batch)
        y = self.convolved(net, x, memory, batch)
        self._tell("convolved", y)
        out = self.empty((rows, net.n_v, d))
        beta_at = 0 if len(gates) == 2 else net.n_v
        lists = memory.states, memory.keys, memory.deltas, memory.decays
        given = gates[0], gates[-1], beta_at, net.a, net.dt, *places, *lists, out
        ns = (rows + 1) * d * d / 32.0
        self.do(delta_net.delta_rule, y, net.n_k, net.grouped, *given, items=net.n_v, ns=ns)
        self.do(delta_net.keep_keys, y, net.n_k, *places, memory.keys, items=rows, ns=0.1 * net.n_k * d)
        return out.reshape(rows, -1)

    def convolved(
        self, net: DeltaNet[np.ndarray], x: np.ndarray, memory: RecurrentCache[np.ndarray], batch: Batch[np.ndarray]
    ) -> np.ndarray:
        """The inputs of the rule made from x: float32 [rows, n_channels], queries and keys, normalized, and values."""
        rows, channels = x.shape
        y = self.empty(x.shape)
        block = delta_net.CHANNELS
        given = x, batch.positions, self.slots_of(batch), net.conv1d, memory.conv, y
        self.do(delta_net.causal_conv, *given, items=-(-channels // block), ns=3.0 * block * rows)
        d, items = net.state_size, rows * 2 * net.n_k
        self.do(delta_net.l2_norm, y, net.n_k, d, f32(net.eps), f32(1.0 / d**0.5), items=items, ns=20 + 0.5 * d)
        return y

    # --- mixtures of experts -----------------------------------------------------------------------------------

    def experts(
        self,
        experts: Experts[np.ndarray, Matrix],
        residual: np.ndarray | None,
        x: np.ndarray,
        router_x: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
    ) -> np.ndarray:
        rows, n_used, n_expert = x.shape[0], experts.n_used, experts.n_expert
        (logits,) = self.matmul(x if router_x is None else router_x, experts.router)
        ids, weights = self.empty((rows, n_used), np.int32), self.empty((rows, n_used))
        routing, ns = experts.routing, 1.0 * n_used * n_expert
        if routing == Routing():
            self.do(mixture.route, logits, n_expert, ids, weights, items=rows, ns=ns)
        else:
            gating, numbers = GATINGS.index(routing.gating), (f32(routing.floor), f32(routing.weight_scale))
            biases = tuple(_NO_WEIGHTS if b is None else b for b in (experts.router_bias, experts.selection_bias))
            given: tuple[object, ...] = logits, n_expert, gating, *biases, routing.normalized, *numbers
            groups, table = (routing.n_group, routing.n_group_used, routing.group_best), (_NO_TABLE, _NO_IDS)
            if experts.given is not None:
                assert tokens is not None, "experts that a table gives need the tokens"
                table = experts.given, tokens
            self.do(router.route_by, *given, *groups, *table, ids, weights, items=rows, ns=ns + 10.0 * n_expert)
        pairs = self._pairs(ids, n_expert)
        if experts.scales is not None:
            self.do(mixture.scale_weights, ids, experts.scales, weights, items=rows, ns=2.0 * n_used, joined=True)
        activation = experts.activation
        stacks: list[Matrix] = present(experts.gate, experts.up)
        *gate, up = self._expert_products(x, pairs, *stacks)
        if experts.gate is not None:
            self._finish(gate[0], ids, experts.gate_scale, experts.gate_bias)
        self._finish(up, ids, experts.up_scale, experts.up_bias)
        act = self.activate(activation, gate[0] if gate else None, up)
        (y,) = self._expert_products(act, pairs, experts.down)
        self._finish(y, ids, experts.down_scale, experts.down_bias)
        shared = _NOTHING
        if experts.shared is not None:
            others: list[Matrix] = present(*experts.shared[:2])
            *gate, up = self.matmul(x, *others)
            (shared,) = self.matmul(self.activate(activation, gate[0] if gate else None, up), experts.shared[2])
        out = self.empty(x.shape)
        last = logits if experts.shared_gated else _NOTHING
        self.do(
            *(mixture.join, _NOTHING if residual is None else residual, y, weights, shared, last, out),
            items=rows,
            ns=0.2 * (n_used + 2) * x.shape[1],
        )
        return out

    def _finish(self, y: np.ndarray, ids: np.ndarray, scales: np.ndarray | None, biases: np.ndarray | None) -> None:
        """y * scale + bias of the pair's expert, in place: y [pairs, n]."""
        if scales is not None or biases is not None:
            given = y, ids, _NO_WEIGHTS if scales is None else scales, _NOTHING if biases is None else biases
            self.do(mixture.finish_products, *given, items=y.shape[0], ns=0.1 * y.shape[1])

    def _pairs(self, ids: np.ndarray, n_expert: int) -> Pairs:
        """The pairs of rows and experts, grouped by expert."""
        most = min(n_expert, ids.size)
        pairs = Pairs(
            self.empty((ids.size,), np.int32),
            self.empty((most,), np.int32),
            self.empty((most + 1,), np.int32),
            self.empty((1,), np.int32),
        )
        self.do(mixture.group, ids, n_expert, *pairs, items=1, ns=2.0 * (n_expert + ids.size))
        return pairs

    def _expert_products(self, x: np.ndarray, pairs: Pairs, *weights: Matrix) -> list[np.ndarray]:
        """Rows of x times the matrices of their experts: float32 [pairs, R] for each weight.  x has a row for each pair, or
        one for all pairs of a row."""
        n, columns = pairs.order.size, x.shape[1]
        share = n // x.shape[0]
        units = {weight.format.unit for weight in weights if isinstance(weight, Records)}
        quantized = {unit: self._quantize(x, unit) for unit in sorted(units)}
        outputs = []
        for i, weight in enumerate(weights):
            n_rows = weight.rows if isinstance(weight, Records) else weight.rows // weight.stack
            out = self.empty((n, n_rows))
            matrix: tuple[object, ...]
            if isinstance(weight, Records):
                kernel = mixture.matmul_experts(weight.format.name, HOST)
                matrix = weight.data, *quantized[weight.format.unit]
                each = weight.data.shape[1]
            else:
                kernel = mixture.matmul_float_experts(weight.format.name)
                matrix = weight.data, weight.first, weight.pitch or n_rows, x
                each = n_rows
            given = *matrix, pairs.order, share, *pairs[1:], out
            items, ns = pairs.used.size * each, columns / 8.0 * -(-n // pairs.used.size)
            self.do(kernel, *given, items=items, ns=ns, joined=i > 0)
            outputs.append(out)
        return outputs

    def grouped_matmul(self, x: np.ndarray, weight: Matrix, n_group: int) -> np.ndarray:
        rows = x.shape[0]
        # As experts: pair row * n_group + g uses the matrix g.
        starts = np.arange(n_group + 1, dtype=np.int32)
        order = np.arange(rows * n_group, dtype=np.int32).reshape(rows, n_group).T.reshape(-1).copy()
        pairs = Pairs(order, starts[:-1].copy(), starts * np.int32(rows), np.array([n_group], np.int32))
        (y,) = self._expert_products(x.reshape(rows * n_group, -1), pairs, weight)
        return y.reshape(rows, -1)

    # --- drafting ----------------------------------------------------------------------------------------------

    def plain(self, x: np.ndarray) -> np.ndarray:
        return x

    def keep_rows(self, ring: np.ndarray, x: np.ndarray, batch: Batch[np.ndarray]) -> None:
        given = ring, x, batch.positions, self.slots_of(batch)
        self.do(mtp.keep_rows, *given, items=x.shape[0], ns=0.1 * x.shape[1])

    def beside(self, e: np.ndarray, hiddens: np.ndarray, batch: Batch[np.ndarray]) -> np.ndarray:
        rows, n = e.shape[0], e.shape[1] + hiddens.shape[2]
        out = self.empty((rows, n))
        self.do(mtp.beside, e, hiddens, batch.positions, self.slots_of(batch), out, items=rows, ns=0.1 * n)
        return out

    def mtp_input(
        self,
        e: np.ndarray,
        e_norm: np.ndarray,
        hiddens: np.ndarray,
        h_norm: np.ndarray,
        batch: Batch[np.ndarray],
        eps: float,
    ) -> np.ndarray:
        rows, n = e.shape
        out = self.empty((rows * (hiddens.shape[2] // n), 2 * n))
        given = e, e_norm, hiddens, h_norm, batch.positions, self.slots_of(batch), f32(eps), out
        self.do(mtp.mtp_input, *given, items=rows, ns=0.6 * n)
        return out
