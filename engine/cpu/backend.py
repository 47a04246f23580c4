"""The operations a forward pass is written against, on the CPU.

Arrays are NumPy arrays.  Every method returns a new array unless it says "in place"; shapes are [rows, ...].
"""

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Pass
from engine.cache.kv import LayerCache
from engine.cache.recurrent import RecurrentLayer
from engine.cache.types import BLOCK, CacheType
from engine.compile.jobs import Job, noted
from engine.cpu import (
    attention,
    bandwidth,
    delta_net,
    embed,
    glu,
    matmul,
    mtp,
    per_layer,
    quantized_cache,
    rms_norm,
    rope,
    softcap,
)
from engine.cpu import experts as mixture
from engine.cpu.memory import available_memory
from engine.decode.sampler import Sampler, SamplingParams
from engine.errors import UsageError
from engine.models.delta_net import DeltaNet
from engine.models.experts import Experts, check_activation
from engine.models.heads import Heads
from engine.models.weights import Weight
from engine.ops import AnyOperations, Decoder, DeviceMemory, Forward, Observation, Observer
from engine.speculative.params import SpeculationParams
from engine.speculative.steps import HostSteps, Steps

f32 = np.float32

BATCH_SIZE = 128
"""Rows of a pass that reads a prompt, unless something else is asked for: more are not faster."""


class Backend:
    """Operations on ``n_threads`` threads (0: as many as the machine offers).  The thread count never shows in a bit."""

    name = "cpu"
    ahead_drafted = 1
    """Steps with drafts that are under way at once."""

    def __init__(self, n_threads: int = 0, max_rows: int = 0) -> None:
        """max_rows: of a pass that reads a prompt, 0: 128; longer prompts take several.  No bit depends on it."""
        available = numba.config.NUMBA_NUM_THREADS
        if not 0 <= n_threads <= available:
            raise UsageError(f"threads must be between 1 and {available}, not {n_threads}.")
        self.n_threads = n_threads or available
        self.max_rows = max_rows or BATCH_SIZE
        self._observer: Observer[np.ndarray] | None = None
        numba.set_num_threads(self.n_threads)

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The device as reports name it."""
        return "cpu"

    @property
    def gpu_name(self) -> str:
        """The name of the GPU: there is none."""
        return ""

    def device_memory(self) -> DeviceMemory | None:
        """None: weights and caches lie in host memory."""
        return None

    def bandwidth(self) -> float:
        """Bytes per second that a plain read of memory reaches with ``n_threads`` threads; measured once per process."""
        return bandwidth.machine_bandwidth(self.n_threads)

    def shares_memory_with(self, other: AnyOperations) -> bool:
        """Whether the other one computes on the CPU, too."""
        return isinstance(other, Backend)

    def can_reach(self, other: AnyOperations) -> bool:
        """Whether the other one computes on the CPU, too."""
        return isinstance(other, Backend)

    def reach(self, other: AnyOperations) -> None:
        """Nothing to do: host memory is there for every backend that ``can_reach`` allows."""

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache; 0 where the system does not say.  Weights are mapped, so they take none of it for good."""
        return available_memory()

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention over ``n_ctx`` positions needs beside the cache: next to nothing."""
        return 0

    def loaded(self) -> None:
        """All weights are there."""

    def upload(self, array: np.ndarray) -> np.ndarray:
        """An array the operations can read."""
        return array

    def weight(self, weight: Weight, host: bool = False) -> Weight:
        """A weight matrix the operations can read: here the mapped rows themselves, which are in host memory anyway."""
        return weight

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Zeroed memory; pages are taken from the system when they are first written."""
        return np.zeros(shape, dtype)

    def store(self, target: np.ndarray, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""
        target[first : first + rows.shape[0]] = rows

    def download(self, array: np.ndarray) -> np.ndarray:
        """The values as a NumPy array: here itself."""
        return array

    def inputs(self) -> None:
        """Memory for the inputs of passes between the steps of an answer: here they are arguments."""

    def run(
        self,
        forward: Forward[np.ndarray],
        batch: Pass[np.ndarray],
        n_logits: int,
        inputs: Pass[np.ndarray] | None = None,
    ) -> np.ndarray | None:
        """``forward(batch, n_logits)``: here every operation computes when it is called."""
        return forward(batch, n_logits)

    def next_rows(self, left: int) -> int:
        """How many of the ``left`` tokens of a prompt the next pass should read."""
        return min(left, self.max_rows)

    def jobs(self, model: Decoder[np.ndarray]) -> list[Job]:
        """What has to be compiled before a model can run: every kernel that a pass of one token calls, or one of more."""
        found: dict[Job, None] = {}
        model.reserve(2)
        with noted(found):
            for rows in (1, 2):
                model.compute(Pass(np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)), rows)
            if model.mtp is not None:
                model.mtp.compute(Pass(np.zeros(1, np.int32), np.zeros(1, np.int32)), 1)
        return list(found)

    def warm_up(self, model: Decoder[np.ndarray]) -> None:
        """Load every kernel of a model by running one token; one that is not there yet is compiled."""
        model.forward(np.zeros(1, np.int32), np.zeros(1, np.int32), 1)
        if model.mtp is not None:
            model.mtp.forward(0, 1)

    def observe(self, observer: Observer[np.ndarray] | None) -> None:
        """Call ``observer`` with "query" and "convolved" from now on; None: no more."""
        self._observer = observer

    def _tell(self, name: str, value: np.ndarray) -> None:
        if self._observer is not None:
            self._observer(Observation("", "", {name: value}))

    def can_sample(self, params: SamplingParams) -> bool:
        """Whether ``steps`` can choose tokens in this way: no, logits are where the sampler is."""
        return False

    def steps(self, model: Decoder[np.ndarray], sampler: Sampler, params: SpeculationParams) -> Steps:
        """Steps whose tokens ``sampler`` chooses from logits."""
        return HostSteps(model, sampler, params)

    # --- operations --------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Rows ``tokens`` int32 [rows] of the embedding, times scale: float32 [rows, n_embd]."""
        out = np.empty((tokens.size, table.columns), f32)
        entry = table.format
        embed.embed_rows(int(entry.type), entry.block, entry.block_bytes, table.data, tokens, f32(scale), out)
        return out

    def matmul(self, x: np.ndarray, *weights: Weight) -> list[np.ndarray]:
        """x float32 [rows, K] times each weight [R, K]: a float32 [rows, R] for each; x is quantized once per unit."""
        quantized: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        outputs = []
        numba.set_num_threads(self.n_threads)
        for weight in weights:
            entry = weight.format
            out = np.empty((x.shape[0], weight.rows), f32)
            if entry.quantized:
                if entry.unit not in quantized:
                    quantized[entry.unit] = self._quantize(x, entry.unit)
                q, d, s = quantized[entry.unit]
                has_min = entry.min_max > 0
                matmul.matmul_quantized(int(entry.type), entry.unit, has_min, weight.data, q, d, s, self.n_threads, out)
            else:
                matmul.matmul_float(int(entry.type), entry.block_bytes, weight.data, x, self.n_threads, out)
            outputs.append(out)
        return outputs

    def matmul_add(self, residual: np.ndarray, x: np.ndarray, weight: Weight) -> np.ndarray:
        """residual + x times the weight."""
        return self.add(residual, self.matmul(x, weight)[0])

    def _quantize(self, x: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = x.shape
        q = np.empty((rows, columns), np.int8)
        d = np.empty((rows, columns // unit), f32)
        s = np.empty((rows, columns // 16), np.int16)
        matmul.quantize_rows(x, unit, q, d, s)
        return q, d, s

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y; y may be a bias [n] for every row."""
        return x + y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """Normalize the last axis of x [..., n]; weight [n]."""
        y = np.empty_like(x)
        n = weight.size
        rms_norm.rms_norm(x.reshape(-1, n), weight, f32(eps), y.reshape(-1, n))
        return y

    def rms_norm_add(
        self, residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0
    ) -> np.ndarray:
        """(residual + normalized x) * scale."""
        y = np.empty_like(x)
        rms_norm.rms_norm_add(residual, x, weight, f32(eps), f32(scale), y)
        return y

    def per_layer_inputs(
        self, m: np.ndarray, e: np.ndarray, weight: np.ndarray, scale: float, eps: float
    ) -> np.ndarray:
        """What each layer adds of the token itself: m, e [rows, layers * n], weight [n] to [layers, rows, n]
        (``engine/cpu/per_layer.py``)."""
        rows, n = m.shape[0], weight.size
        out = np.empty((m.shape[1] // n, rows, n), f32)
        per_layer.per_layer_inputs(m, e, weight, f32(scale), f32(eps), out)
        return out

    def attention(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        cache: LayerCache[np.ndarray],
        batch: Pass[np.ndarray],
        table: np.ndarray,
    ) -> np.ndarray:
        """Store k and v [rows, heads * width] at their positions and attend q over the cache: float32 [rows, n_head * d_v].

        Before that: biases, normalization of each head of q and k where the layer has them, and rotation by ``table``.  Where
        heads are gated, q is [rows, n_head * 2 * d_k] and the result is multiplied by the logistic function of the gates.
        """
        gates = None
        if heads.gated:
            both = q.reshape(batch.rows, heads.n_head, 2, heads.d_k)
            q, gates = np.ascontiguousarray(both[:, :, 0]), both[:, :, 1]
        queries = self._queries(heads, q, batch.positions, table)
        self.remember(heads, k, v, cache, batch, table)
        out = self.attend(queries, cache, batch.positions, heads.scale)
        if gates is not None:
            glu.sigmoid_gate(out.reshape(batch.rows, heads.n_head, heads.d_v), gates)
        return out

    def attend_past(
        self,
        heads: Heads[np.ndarray],
        q: np.ndarray,
        cache: LayerCache[np.ndarray],
        batch: Pass[np.ndarray],
        last: np.ndarray,
        table: np.ndarray,
        window: int,
    ) -> np.ndarray:
        """Attention of queries q [rows, n_head * d_k] at the rows' positions over what lies in the cache up to position
        ``last`` int32 [rows] of each, as far back as ``window`` (0: all): float32 [rows, n_head * d_v].  Nothing is stored.
        """
        return self.attend(self._queries(heads, q, batch.positions, table), cache, last, heads.scale, window)

    def _queries(self, heads: Heads[np.ndarray], q: np.ndarray, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Queries with bias, normalized and rotated by position: [rows, n_head, d_k]."""
        if heads.biases:
            q = self.add(q, heads.biases[0])
        q = q.reshape(positions.size, heads.n_head, heads.d_k)
        if heads.q_norm is not None:
            q = self.rms_norm(q, heads.q_norm, heads.eps)
        return self.rope(q.copy(), positions, table, heads.neox)

    def remember(
        self,
        heads: Heads[np.ndarray],
        k: np.ndarray,
        v: np.ndarray,
        cache: LayerCache[np.ndarray],
        batch: Pass[np.ndarray],
        table: np.ndarray,
    ) -> None:
        """What ``attention`` does with k and v: bias, normalization, rotation, and into the cache at their positions.  v may
        be the same array as k."""
        if heads.biases:
            k, v = self.add(k, heads.biases[1]), self.add(v, heads.biases[2])
        rows, positions = batch.rows, batch.positions
        k, v = k.reshape(rows, heads.n_head_kv, heads.d_k), v.reshape(rows, heads.n_head_kv, heads.d_v)
        if heads.v_normed:
            v = self.rms_norm(v, np.ones(heads.d_v, f32), heads.eps)
        if heads.k_norm is not None:
            k = self.rms_norm(k, heads.k_norm, heads.eps)
        self.append(cache, self.rope(k.copy(), positions, table, heads.neox), v, positions)

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
        """Rotate x [rows, heads, head_dim] in place by its positions; returns it."""
        rope.rope(x, positions, table, neox)
        return x

    def append(self, cache: LayerCache[np.ndarray], k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        """Store k, v [rows, n_head_kv, head_dim] at their positions."""
        given = (cache.k_type, k, cache.keys, False), (cache.v_type, v, cache.values, True)
        for kind, x, ring, by_position in given:
            if kind.quantized:
                quantized_cache.append(self._rotated(x), positions, kind.bits, by_position, ring)
            else:
                attention.append(x, positions, kind.bits == 16, by_position, ring)

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """x [..., d], each block of 32 rotated (``engine/cpu/quantized_cache.py``)."""
        out = np.array(x, f32, order="C")
        quantized_cache.rotate_rows(out.reshape(-1, x.shape[-1]))
        return out

    def int8_queries(self, q: np.ndarray, scale: float, k_type: CacheType) -> tuple[np.ndarray, np.ndarray]:
        """Queries [rows, n_head, d_k] as quantized keys want them: int8, and float32 [rows, n_head, d_k / 32]; for other keys
        none of their elements."""
        d = q.shape[2] if k_type.quantized else 0
        integers, scales = np.empty((*q.shape[:2], d), np.int8), np.empty((*q.shape[:2], d // BLOCK), f32)
        if d:
            rotated = (self._rotated(q) * f32(scale)).reshape(-1, d)
            quantized_cache.quantize_queries(rotated, integers.reshape(-1, d), scales.reshape(-1, d // BLOCK))
        return integers, scales

    def attend(
        self,
        q: np.ndarray,
        cache: LayerCache[np.ndarray],
        positions: np.ndarray,
        scale: float,
        window: int | None = None,
    ) -> np.ndarray:
        """Attention of q [rows, n_head, d_k] over the cache, as far back as its window or another one; float32 [rows,
        n_head * d_v]."""
        self._tell("query", q)
        rows, n_head, _ = q.shape
        out = np.empty((rows, n_head, cache.d_v), f32)
        numba.set_num_threads(self.n_threads)
        window = cache.window if window is None else window
        k, v = cache.k_type, cache.v_type
        if k == v and not k.quantized:
            given = (q, cache.keys, cache.values, positions, f32(scale), window)
            attention.attend(*given, k.bits == 16, self.n_threads, out)
            return out.reshape(rows, -1)
        keys, values = (
            ring.reshape(cache.n_head_kv, cache.chunks, -1).view(np.uint32) for ring in (cache.keys, cache.values)
        )
        query = (q, *self.int8_queries(q, scale, k))
        attention.attend_quantized(
            *query, keys, values, positions, f32(scale), window, k.bits, v.bits, self.n_threads, out
        )
        return (self._rotated(out) if v.quantized else out).reshape(rows, -1)

    def delta_net(
        self,
        net: DeltaNet[np.ndarray],
        x: np.ndarray,
        gates: Sequence[np.ndarray],
        memory: RecurrentLayer[np.ndarray],
        batch: Pass[np.ndarray],
    ) -> np.ndarray:
        """The gated delta rule over x [rows, n_channels]: float32 [rows, n_v * state_size].

        gates: alpha and beta, each [rows, n_v], or both as one [rows, 2 n_v].
        """
        rows, positions, d = batch.rows, batch.positions, net.state_size
        q, k, v = self.convolved(net, x, memory, positions)
        if self._observer is not None:
            self._tell("convolved", np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1))
        out = np.empty((rows, net.n_v, d), f32)
        numba.set_num_threads(self.n_threads)
        alpha, beta = gates if len(gates) == 2 else np.split(gates[0], 2, axis=1)
        # Halves of one row are contiguous and those of many are not: a kernel is compiled for one of the two.
        alpha, beta = np.ascontiguousarray(alpha), np.ascontiguousarray(beta)
        given = (alpha, beta, net.a, net.dt, positions, self.n_threads)
        delta_net.delta_rule(q, k, v, *given, memory.states, out)
        return out.reshape(rows, -1)

    def convolved(
        self, net: DeltaNet[np.ndarray], x: np.ndarray, memory: RecurrentLayer[np.ndarray], positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the rule takes of x: q, k [rows, n_k, state_size], normalized, and v [rows, n_v, state_size]."""
        rows, d = positions.size, net.state_size
        y = np.empty_like(x)
        delta_net.causal_conv(x, positions, net.conv1d, memory.conv, y)
        qk, v = y[:, : 2 * net.n_k * d], y[:, 2 * net.n_k * d :]
        q, k = (np.ascontiguousarray(part).reshape(rows, net.n_k, d) for part in np.split(qk, 2, axis=1))
        delta_net.l2_norm(q.reshape(-1, d), f32(net.eps), f32(1.0 / d**0.5))
        delta_net.l2_norm(k.reshape(-1, d), f32(net.eps), f32(1.0))
        return q, k, np.ascontiguousarray(v).reshape(rows, net.n_v, d)

    def gated_norm(self, x: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
        """x [rows, n], each run of weight.size normalized, times silu(gate)."""
        y, n = np.empty_like(x), weight.size
        delta_net.gated_norm(x.reshape(-1, n), weight, gate.reshape(-1, n), f32(eps), y.reshape(-1, n))
        return y

    def experts(
        self,
        experts: Experts[np.ndarray, Weight],
        residual: np.ndarray | None,
        x: np.ndarray,
        router_x: np.ndarray | None = None,
    ) -> np.ndarray:
        """The mixture of experts of x [rows, n_embd], and residual, if there is one; router_x: what experts are chosen by, if
        that is not x."""
        check_activation(experts.activation)
        rows, n_used = x.shape[0], experts.n_used
        (logits,) = self.matmul(x if router_x is None else router_x, experts.router)
        ids, weights = np.empty((rows, n_used), np.int32), np.empty((rows, n_used), f32)
        mixture.route(logits, experts.n_expert, ids, weights)
        if experts.scales is not None:
            weights = weights * experts.scales[ids]
        # Pairs of a row and an expert, those of an expert side by side.
        order = np.argsort(ids.reshape(-1), kind="stable")
        used, starts = np.unique(ids.reshape(-1)[order], return_index=True)
        starts = np.append(starts, order.size)
        mine = x[order // n_used]
        glu = {"swiglu": self.swiglu, "geglu": self.geglu}[experts.activation]
        gate, up = (self._matmul_experts(mine, w, experts.n_expert, used, starts) for w in (experts.gate, experts.up))
        y = np.empty((order.size, x.shape[1]), f32)
        y[order] = self._matmul_experts(glu(gate, up), experts.down, experts.n_expert, used, starts)
        nothing = np.empty((0, x.shape[1]), f32)
        shared = nothing
        if experts.shared is not None:
            gate, up = self.matmul(x, *experts.shared[:2])
            (shared,) = self.matmul(glu(gate, up), experts.shared[2])
        out = np.empty(x.shape, f32)
        before = nothing if residual is None else residual
        gate_logits = np.ascontiguousarray(logits[:, -1])
        mixture.join(before, y.reshape(rows, n_used, -1), weights, shared, gate_logits, out)
        return out

    def _matmul_experts(
        self, x: np.ndarray, weight: Weight, n_expert: int, used: np.ndarray, starts: np.ndarray
    ) -> np.ndarray:
        """Rows starts[g] .. starts[g + 1] of x times the matrix of expert used[g]."""
        n_rows, entry = weight.rows // n_expert, weight.format
        out = np.empty((x.shape[0], n_rows), f32)
        begins = used * (weight.pitch or n_rows) + weight.first
        if not entry.quantized:
            for begin, first, last in zip(begins, starts, starts[1:], strict=False):
                data = weight.data[begin : begin + n_rows]
                matmul.matmul_float(
                    int(entry.type), entry.block_bytes, data, x[first:last], self.n_threads, out[first:last]
                )
            return out
        numba.set_num_threads(self.n_threads)
        q, d, s = self._quantize(x, entry.unit)
        given = (int(entry.type), entry.unit, entry.min_max > 0, weight.data, begins, n_rows, starts)
        mixture.matmul_experts(*given, q, d, s, self.n_threads, out)
        return out

    def plain(self, x: np.ndarray) -> np.ndarray:
        """x as an array that may be used more than once: here it is one."""
        return x

    def keep_rows(self, ring: np.ndarray, x: np.ndarray, batch: Pass[np.ndarray]) -> None:
        """ring[positions % length] = x: ring [length, n], x [rows, n]."""
        mtp.keep_rows(ring, x, batch.positions)

    def beside(self, e: np.ndarray, hiddens: np.ndarray, batch: Pass[np.ndarray]) -> np.ndarray:
        """e [rows, n] beside the row of the ring ``hiddens`` [length, m] for the position before: float32 [rows, n + m]."""
        return np.concatenate([e, hiddens[(batch.positions - 1) % hiddens.shape[0]]], axis=1)

    def mtp_input(
        self,
        e: np.ndarray,
        e_norm: np.ndarray,
        hiddens: np.ndarray,
        h_norm: np.ndarray,
        batch: Pass[np.ndarray],
        eps: float,
    ) -> np.ndarray:
        """Normalized e [rows, n] beside the normalized row of the ring ``hiddens`` for the position before, or zeros where
        there is none: float32 [rows, 2 n]."""
        rows, n = e.shape
        out = np.empty((rows, 2 * n), f32)
        mtp.mtp_input(e, e_norm, hiddens, h_norm, batch.positions, f32(eps), out)
        return out

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """silu(gate) * up."""
        y = np.empty_like(up)
        glu.swiglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def geglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """gelu(gate) * up."""
        y = np.empty_like(up)
        glu.geglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        """cap * tanh(x / cap), in place; returns x."""
        softcap.softcap(x.reshape(-1), f32(cap))
        return x
