"""The operations that forward passes are written against, on the CPU.

Arrays are NumPy arrays.  Every method returns a new array unless documented as "in place"; shapes are [rows, ...].
"""

from collections.abc import Sequence

import numba
import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Pass
from engine.cache.kv import LayerCache
from engine.cache.recurrent import RecurrentLayer
from engine.cache.types import BLOCK, CacheType
from engine.checks import described
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
"""The default number of rows of a pass that reads a prompt; more rows are not faster."""


class Backend:
    """Operations on ``n_threads`` threads (0: one per available core).  The bits do not depend on the number of threads."""

    name = "cpu"
    ahead_drafted = 1
    """The number of steps with drafts that may be in flight at once."""

    def __init__(self, n_threads: int = 0, max_rows: int = 0) -> None:
        """max_rows: the most rows of a pass that reads a prompt, 0: 128; longer prompts take several passes.  The bits do not
        depend on it.  Raises UsageError for a number of threads that the machine does not have."""
        available = numba.config.NUMBA_NUM_THREADS
        if not 0 <= n_threads <= available:
            raise UsageError(
                f"the number of threads (-t, n_threads) must be 1 to {available}, or 0 for every core, "
                f"not {described(n_threads)}."
            )
        self.n_threads = n_threads or available
        self.max_rows = max_rows or BATCH_SIZE
        self._observer: Observer[np.ndarray] | None = None
        numba.set_num_threads(self.n_threads)

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name of the device in reports: "cpu"."""
        return "cpu"

    @property
    def gpu_name(self) -> str:
        """An empty string: there is no GPU."""
        return ""

    def device_memory(self) -> DeviceMemory | None:
        """None: weights and caches are in host memory."""
        return None

    def bandwidth(self) -> float:
        """Bytes per second of a plain read of memory with ``n_threads`` threads; measured once per process."""
        return bandwidth.machine_bandwidth(self.n_threads)

    def shares_memory_with(self, other: AnyOperations) -> bool:
        """Whether the other backend also computes on the CPU."""
        return isinstance(other, Backend)

    def can_reach(self, other: AnyOperations) -> bool:
        """Whether the other backend also computes on the CPU."""
        return isinstance(other, Backend)

    def reach(self, other: AnyOperations) -> None:
        """Do nothing: all backends for which ``can_reach`` is true share host memory."""

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache; 0 if unknown.  ``weights`` is not subtracted, because weights are mapped and the system can
        reclaim their pages."""
        return available_memory()

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """0: attention needs almost no memory besides the cache."""
        return 0

    def loaded(self) -> None:
        """Do nothing: loading leaves no memory to release."""

    def upload(self, array: np.ndarray) -> np.ndarray:
        """The array itself, which the operations can read."""
        return array

    def weight(self, weight: Weight, host: bool = False) -> Weight:
        """The weight matrix itself: the operations read the mapped rows, which are in host memory anyway."""
        return weight

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """A zeroed array; the system allocates its pages when they are first written."""
        return np.zeros(shape, dtype)

    def store(self, target: np.ndarray, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""
        target[first : first + rows.shape[0]] = rows

    def download(self, array: np.ndarray) -> np.ndarray:
        """The array itself, which is a NumPy array."""
        return array

    def inputs(self) -> None:
        """None: passes take their inputs as arguments."""

    def run(
        self,
        forward: Forward[np.ndarray],
        batch: Pass[np.ndarray],
        n_logits: int,
        inputs: Pass[np.ndarray] | None = None,
    ) -> np.ndarray | None:
        """Run ``forward(batch, n_logits)`` and return its result, float32 [n_logits, n_vocab], or None for no logits.  Every
        operation computes when it is called."""
        return forward(batch, n_logits)

    def next_rows(self, left: int) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read."""
        return min(left, self.max_rows)

    def jobs(self, model: Decoder[np.ndarray]) -> list[Job]:
        """A compile job for every kernel that passes of a model call, with one token or with more."""
        found: dict[Job, None] = {}
        model.reserve(2)
        with noted(found):
            for rows in (1, 2):
                model.compute(Pass(np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)), rows)
            if model.mtp is not None:
                model.mtp.compute(Pass(np.zeros(1, np.int32), np.zeros(1, np.int32)), 1)
        return list(found)

    def warm_up(self, model: Decoder[np.ndarray]) -> None:
        """Load every kernel of a model by running one token; kernels that are not compiled yet are compiled."""
        model.forward(np.zeros(1, np.int32), np.zeros(1, np.int32), 1)
        if model.mtp is not None:
            model.mtp.forward(0, 1)

    def observe(self, observer: Observer[np.ndarray] | None) -> None:
        """Call ``observer`` with the values "query" and "convolved" of all further operations; None: stop."""
        self._observer = observer

    def _tell(self, name: str, value: np.ndarray) -> None:
        if self._observer is not None:
            self._observer(Observation("", "", {name: value}))

    def can_sample(self, params: SamplingParams) -> bool:
        """False: the logits are on the host, where the sampler runs."""
        return False

    def steps(self, model: Decoder[np.ndarray], sampler: Sampler, params: SpeculationParams) -> Steps:
        """Steps of ``model`` whose tokens ``sampler`` chooses on the host, and whose drafts it accepts by ``params``."""
        return HostSteps(model, sampler, params)

    # --- operations --------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Rows ``tokens`` int32 [rows] of the embedding, times scale: float32 [rows, n_embd]."""
        out = np.empty((tokens.size, table.columns), f32)
        entry = table.format
        embed.embed_rows(int(entry.type), entry.block, entry.block_bytes, table.data, tokens, f32(scale), out)
        return out

    def matmul(self, x: np.ndarray, *weights: Weight) -> list[np.ndarray]:
        """x float32 [rows, K] times each weight [R, K]: float32 [rows, R] for each; x is quantized once per unit."""
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
        """residual + x @ weight^T: residual [rows, R], x [rows, K], weight [R, K]; float32 [rows, R]."""
        return self.add(residual, self.matmul(x, weight)[0])

    def _quantize(self, x: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = x.shape
        q = np.empty((rows, columns), np.int8)
        d = np.empty((rows, columns // unit), f32)
        s = np.empty((rows, columns // 16), np.int16)
        matmul.quantize_rows(x, unit, q, d, s)
        return q, d, s

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y: x [rows, n], y [rows, n] or a bias [n] that is added to every row."""
        return x + y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [..., n], weight [n]; float32 [..., n]."""
        y = np.empty_like(x)
        n = weight.size
        rms_norm.rms_norm(x.reshape(-1, n), weight, f32(eps), y.reshape(-1, n))
        return y

    def rms_norm_add(
        self, residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0
    ) -> np.ndarray:
        """(residual + rms_norm(x, weight, eps)) * scale: residual, x [rows, n], weight [n]; float32 [rows, n]."""
        y = np.empty_like(x)
        rms_norm.rms_norm_add(residual, x, weight, f32(eps), f32(scale), y)
        return y

    def per_layer_inputs(
        self, m: np.ndarray, e: np.ndarray, weight: np.ndarray, scale: float, eps: float
    ) -> np.ndarray:
        """The per-layer embeddings of the tokens (``engine/cpu/per_layer.py``): m, e [rows, layers * n], weight [n]; float32
        [layers, rows, n]."""
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

        First, depending on ``heads``, biases are added, each head of q, k and v is normalized, and q and k are rotated by
        ``table``.  If heads are gated, q is [rows, n_head * 2 * d_k] and the result is multiplied by sigmoid(gates).
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
        """Attend q [rows, n_head * d_k], rotated by the rows' positions, over the cached positions up to ``last`` int32
        [rows] of each row, at most ``window`` positions back (0: all): float32 [rows, n_head * d_v].  Nothing is stored.
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
        """Store k [rows, n_head_kv * d_k] and v [rows, n_head_kv * d_v] in the cache at the rows' positions, after the
        biases, normalization and rotation of ``attention``.  v may be k."""
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
        """Rotate x [rows, heads, head_dim] by its positions, in place; returns x."""
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
        """Queries [rows, n_head, d_k] quantized for quantized keys: int8, and scales float32 [rows, n_head, d_k / 32]; empty
        arrays for other types of keys."""
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
        """Attend q [rows, n_head, d_k] over the cache, as far back as ``window``, or as its own window if that is None:
        float32 [rows, n_head * d_v]."""
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

        gates: alpha and beta, each [rows, n_v], or both concatenated, [rows, 2 n_v].
        """
        rows, positions, d = batch.rows, batch.positions, net.state_size
        q, k, v = self.convolved(net, x, memory, positions)
        if self._observer is not None:
            self._tell("convolved", np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=1))
        out = np.empty((rows, net.n_v, d), f32)
        numba.set_num_threads(self.n_threads)
        alpha, beta = gates if len(gates) == 2 else np.split(gates[0], 2, axis=1)
        # Halves of a single row are contiguous, those of several rows are not; the kernel is compiled for one case only.
        alpha, beta = np.ascontiguousarray(alpha), np.ascontiguousarray(beta)
        given = (alpha, beta, net.a, net.dt, positions, self.n_threads)
        delta_net.delta_rule(q, k, v, *given, memory.states, out)
        return out.reshape(rows, -1)

    def convolved(
        self, net: DeltaNet[np.ndarray], x: np.ndarray, memory: RecurrentLayer[np.ndarray], positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The inputs of the rule made from x: q, k [rows, n_k, state_size], normalized, and v [rows, n_v, state_size]."""
        rows, d = positions.size, net.state_size
        y = np.empty_like(x)
        delta_net.causal_conv(x, positions, net.conv1d, memory.conv, y)
        qk, v = y[:, : 2 * net.n_k * d], y[:, 2 * net.n_k * d :]
        q, k = (np.ascontiguousarray(part).reshape(rows, net.n_k, d) for part in np.split(qk, 2, axis=1))
        delta_net.l2_norm(q.reshape(-1, d), f32(net.eps), f32(1.0 / d**0.5))
        delta_net.l2_norm(k.reshape(-1, d), f32(net.eps), f32(1.0))
        return q, k, np.ascontiguousarray(v).reshape(rows, net.n_v, d)

    def gated_norm(self, x: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
        """rms_norm of each run of d elements of x, times silu(gate): x, gate [rows, n], weight [d]; float32 [rows, n]."""
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
        """The mixture of experts of x [rows, n_embd], added to the residual unless that is None: float32 [rows, n_embd].
        router_x: the input of the router, None: x."""
        check_activation(experts.activation)
        rows, n_used = x.shape[0], experts.n_used
        (logits,) = self.matmul(x if router_x is None else router_x, experts.router)
        ids, weights = np.empty((rows, n_used), np.int32), np.empty((rows, n_used), f32)
        mixture.route(logits, experts.n_expert, ids, weights)
        if experts.scales is not None:
            weights = weights * experts.scales[ids]
        # Pairs of a row and an expert, grouped by expert.
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
        """Rows [starts[g], starts[g + 1]) of x times the matrix of expert used[g]: float32 [pairs, R]."""
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
        """x itself, which is an array and may be used any number of times."""
        return x

    def keep_rows(self, ring: np.ndarray, x: np.ndarray, batch: Pass[np.ndarray]) -> None:
        """ring[positions % length] = x, row by row: ring [length, n], x [rows, n], rows <= length."""
        mtp.keep_rows(ring, x, batch.positions)

    def beside(self, e: np.ndarray, hiddens: np.ndarray, batch: Pass[np.ndarray]) -> np.ndarray:
        """e [rows, n] and the row of the ring ``hiddens`` [length, m] for the position before, concatenated: float32
        [rows, n + m]."""
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
        """Normalized e [rows, n] and the normalized row of the ring ``hiddens`` for the position before (zeros at position
        0), concatenated: float32 [rows, 2 n]."""
        rows, n = e.shape
        out = np.empty((rows, 2 * n), f32)
        mtp.mtp_input(e, e_norm, hiddens, h_norm, batch.positions, f32(eps), out)
        return out

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """silu(gate) * up, element by element: float32 [rows, n]."""
        y = np.empty_like(up)
        glu.swiglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def geglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """gelu(gate) * up, element by element, with the tanh approximation of gelu: float32 [rows, n]."""
        y = np.empty_like(up)
        glu.geglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        """cap * tanh(x / cap), in place; returns x."""
        softcap.softcap(x.reshape(-1), f32(cap))
        return x
