"""The arithmetic of a forward pass, which all backends compute with the same bits.

Shapes are [rows, ...], and elements are float32 unless stated otherwise.  A row of a result depends only on the same row of
the inputs and on the contents of the caches.  It does not depend on the number of rows in the pass.
"""

from collections.abc import Sequence
from typing import Protocol

from numpy.typing import DTypeLike

from engine.arrays import A, Batch, M, V
from engine.cache.compressed import Blocks, CompressedCache, PagedRows
from engine.cache.kv import AttentionCache
from engine.cache.latent import LatentCache
from engine.cache.mamba import MambaCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.short_conv import ShortConvCache
from engine.ops.activation import Activation
from engine.ops.compressor import Compressor
from engine.ops.delta_net import DeltaNet
from engine.ops.experts import ChosenExperts, Experts
from engine.ops.heads import Heads
from engine.ops.kda import KDA
from engine.ops.latent import Latent
from engine.ops.mamba import Mamba


class Arithmetic(Protocol[A, V, M]):
    """The operations of a pass on arrays ``A``, values ``V`` (arrays or deferred results) and matrices ``M``.

    They may be called only within ``run``, ``jobs`` or ``warm_up``.
    """

    def embed(self, table: M, tokens: A, scale: float = 1.0) -> A:
        """table[tokens] * scale: tokens int32 [rows], table [n_vocab, n].  Returns float32 [rows, n]."""

    def matmul(self, x: V, *weights: M) -> list[A]:
        """x @ W^T for each weight W: x [rows, K], W [R, K].  Returns float32 [rows, R] for each weight.

        If W is quantized, each unit of 32 or 256 elements of a row of x is first rounded to int8.
        """

    def matmul_add(self, residual: A, x: V, weight: M, bias: A | None = None) -> A:
        """residual + (x @ weight^T + bias): residual [rows, R], x [rows, K], weight [R, K], bias [R].

        Returns float32 [rows, R].
        """

    def add(self, x: A, y: A, scale: float = 1.0) -> A:
        """x + scale * y: x [rows, n], y [rows, n], or a bias [n] that is added to every row.  Returns float32 [rows, n]."""

    def scale(self, x: A, factor: float) -> A:
        """x * factor: x [rows, n].  Returns a new array, float32 [rows, n]."""

    def rms_norm(self, x: A, weight: A, eps: float) -> V:
        """x / sqrt(mean(x^2) + eps) * weight for each row: x [rows, n], weight [n].  Returns float32 [rows, n]."""

    def grouped_norm(self, x: A, weight: A, n_group: int, eps: float) -> A:
        """rms_norm of each of ``n_group`` equal runs of a row, with weights of their own: x [rows, n], weight [n].  Returns
        float32 [rows, n]."""

    def rms_norm_add(self, residual: A, x: A, weight: A, eps: float, scale: float = 1.0) -> A:
        """(residual + rms_norm(x, weight, eps)) * scale: residual, x [rows, n], weight [n].  Returns float32 [rows, n]."""

    def layer_norm(self, x: A, weight: A, bias: A | None, eps: float) -> V:
        """(x - mean) / sqrt(variance + eps) * weight + bias for each row: x [rows, n], weight [n], bias [n], or None for no
        bias.  Without a bias, weight may be [m * n], m sets of weights: row t uses set t mod m.

        Returns float32 [rows, n]."""

    def per_layer_inputs(self, m: A, e: A, weight: A, scale: float, eps: float) -> A:
        """(rms_norm(m * scale, weight, eps) + e) / sqrt(2) for each run of n elements (the per-layer embeddings of Gemma 3n):
        m, e [rows, layers * n], weight [n].  Returns float32 [layers, rows, n]."""

    def attention(
        self, heads: Heads[A], q: A, k: A, v: A, cache: AttentionCache[A], batch: Batch[A], table: A | None
    ) -> V:
        """Store k and v in the cache at the rows' positions, then compute causal attention of q over the cache.

        The result is softmax(scale * q k^T) v, computed in chunks of 64 positions.  Each row attends to the positions in the
        cache's window up to its own position.  Each head of q uses the key and value head of its group.

        First, depending on ``heads``, biases are added, heads of q, k and v are normalized, q and k are rotated, and q is
        multiplied by a factor that depends on its position.  A head may have a sink, which is an additional score of its
        softmax, without a value.

        q: [rows, n_head * d_k].  If heads are gated, [rows, n_head * 2 * d_k], with the gates of each head after its queries;
            the result is then multiplied by sigmoid(gates).
        k: [rows, n_head_kv * d_k].
        v: [rows, n_head_kv * d_v].  It may be the same array as k.
        table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position; None: there is no rotation.

        Returns float32 [rows, n_head * d_v].
        """

    def attend_past(
        self,
        heads: Heads[A],
        q: A,
        cache: AttentionCache[A],
        batch: Batch[A],
        last: A,
        table: A | None,
        window: int,
        spans: bool = False,
    ) -> V:
        """Compute attention of q over cached positions.  Nothing is stored.

        q: [rows, n_head * d_k], which is rotated by the rows' positions unless ``table`` is None.
        last: int32 [rows], the last position to which each row attends, or its span (``engine/ops/spans.py``).
        table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position; None: there is no rotation.
        window: the maximum number of positions to which a row attends; 0: all.
        spans: whether ``last`` are spans of a window of 2 * reach + 1 positions.

        Returns float32 [rows, n_head * d_v].
        """

    def remember(self, heads: Heads[A], k: A, v: A, cache: AttentionCache[A], batch: Batch[A], table: A | None) -> None:
        """Store k and v in the cache at the rows' positions, after the biases, norms and rotation of :meth:`attention`.

        k: [rows, n_head_kv * d_k].
        v: [rows, n_head_kv * d_v].  It may be the same array as k.
        table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position; None: there is no rotation.
        """

    def places(self, positions: A, batch: Batch[A], dropped: A) -> A:
        """The positions of rows minus the number of positions that their sequences have dropped, int32 [rows].

        positions: int32 [rows].
        dropped: int32 [slots].
        """

    def latent_attention(
        self,
        latent: Latent[A, M],
        q: A,
        q_rope: A,
        c: A,
        k_rope: A,
        cache: LatentCache[A],
        batch: Batch[A],
        chosen: A | None = None,
    ) -> A:
        """Store latents as :meth:`remember_latent` does, then compute causal attention over the cached latents.

        The query of head h is [k_b_h q_h, q_rope_h], with q_rope rotated by position.  The key of a position is its stored
        vector, and the value consists of the first ``rank`` elements of that vector.  softmax(scale * query keys^T) values is
        multiplied by the matrix v_b_h.

        q: [rows, n_head * n_nope].
        q_rope: [rows, n_head * n_rope].
        c: [rows, rank].
        k_rope: [rows, n_rope].
        chosen: int32 [rows, top_k], the positions to which each row attends (:meth:`choose_rows`); None: all that it sees.
            If it chooses all of them, the bits are those of None.

        Returns float32 [rows, n_head * d_v].
        """

    def remember_latent(self, latent: Latent[A, M], c: A, k_rope: A, cache: LatentCache[A], batch: Batch[A]) -> None:
        """Store [rms_norm(c), k_rope] at the rows' positions, with k_rope rotated by position.

        c: [rows, rank].
        k_rope: [rows, n_rope].
        """

    def delta_net(self, net: DeltaNet[A], x: A, gates: Sequence[A], memory: RecurrentCache[A], batch: Batch[A]) -> A:
        """The gated delta rule (Yang et al. 2024).

        A causal convolution and silu are applied to x.  The result is split into q, k and v, and heads of q and k are
        normalized.  Each value head has a state S [d, d] and uses the query and key head that ``net`` assigns to it.  For
        each row, in order:
        S = exp(a * softplus(alpha + dt)) S;  S_j = S_j + sigmoid(beta) (v_j - S_j . k) k;  o_j = S_j . q.

        x: [rows, n_channels].
        gates: alpha and beta, each [rows, n_v], or one array with both concatenated, [rows, 2 n_v].
        memory: the state before the first row is read from it, and the updates and states of the rows are stored in it.

        Returns o, float32 [rows, n_v * d].
        """

    def short_conv(self, weight: A, bcx: A, memory: ShortConvCache[A], batch: Batch[A]) -> A:
        """The gated short convolution: y_p = c_p * sum_j w[j] * u_(p - taps + 1 + j), with u = b * x, element by element.

        weight: w, float32 [n, taps], the oldest tap first.
        bcx: b, c and x of each row, [rows, 3 n].
        memory: u of the positions before the first row is read from it, and u of the rows is stored in it.

        Returns y, float32 [rows, n].
        """

    def mamba(self, net: Mamba[A], u: A, z: A, memory: MambaCache[A], batch: Batch[A]) -> A:
        """One step of Mamba-2 per row: the convolution, the recurrence and the gate, without the norm after it.

        For head h of group g, with x, b, c = silu(conv(v)), s = softplus(step + dt) and e = exp(a * s): S_i = (s * x_i) * b_g
        + e * S_i and y_i = (S_i . c_g + skip * x_i) * silu(z_i).

        u: v and the step of each head, [rows, n_channels + n_head].
        z: [rows, n_head * d].
        memory: the inputs of the convolution for earlier positions, the state and the tokens of its segment are read from it,
            and those of the rows are stored in it.

        Returns y, float32 [rows, n_head * d].
        """

    def kda(self, net: KDA[A], q: A, k: A, v: A, f: A, b: A, memory: MambaCache[A], batch: Batch[A]) -> A:
        """One step of Kimi delta attention per row: the convolutions, the norms of queries and keys, and the recurrence.

        For each head, with q, k, v after the convolutions and norms, e = exp(a * softplus(f + dt)) for each element of the
        key, and rate = sigmoid(b): S_i = e * S_i, u_i = (v_i - S_i . k) * rate, S_i = u_i * k + S_i and y_i = S_i . q.

        q, k, v, f: [rows, n_head * d].
        b: [rows, n_head].
        memory: the inputs of the convolutions for earlier positions, the state and the tokens of its segment are read from
            it, and those of the rows are stored in it.

        Returns y, float32 [rows, n_head * d].
        """

    def gated_norm(self, x: A, weight: A, gate: A, eps: float, swish: bool = True) -> V:
        """rms_norm of each run of d elements of x, multiplied by silu(gate), or by sigmoid(gate) unless ``swish``: x, gate
        [rows, n], weight [d]; d divides n.

        Returns float32 [rows, n].
        """

    def gate_heads(self, x: A, gates: A) -> A:
        """Each head of x multiplied by sigmoid(its gate): x [rows, heads * d], gates [rows, heads].  Returns a new array,
        float32 [rows, heads * d]."""

    def experts(
        self, experts: Experts[A, M], residual: A | None, x: V, router_x: V | None = None, tokens: A | None = None
    ) -> A:
        """residual + the weighted sum of the outputs of the ``n_used`` best experts for each row of x.

        Experts are chosen by the logits router_x @ router^T and the law ``experts.routing``.  Weights are multiplied by
        ``experts.scales`` unless that is None.  They are weights of inputs, not of outputs, if ``experts.weighs_inputs``.
        The output of a shared network, if there is one, is added.  It is multiplied by sigmoid(the router's last output) if
        ``experts.shared_gated``.

        residual: [rows, n_embd]; None: there is no residual.
        x: [rows, n_embd].
        router_x: [rows, n_embd]; None: x.
        tokens: int32 [rows], needed if ``experts.given`` is a table.

        Returns float32 [rows, n_embd].
        """

    def choose_experts(self, experts: Experts[A, M], x: V, tokens: A | None = None) -> ChosenExperts[A]:
        """The choice of experts that :meth:`experts` makes for each row of x [rows, n_embd], which is ``router_x`` there.
        The matrices of the experts and of the shared network are not read.

        tokens: int32 [rows], needed if ``experts.given`` is a table.
        """

    def sum_experts(self, experts: Experts[A, M], x: V, ids: A, weights: A) -> A:
        """The weighted sum of the outputs of given experts for each row of x, in the order of ids, without a shared network.

        x: [rows, n_embd].
        ids: int32 [rows, n_used].
        weights: float32 [rows, n_used].

        Returns float32 [rows, n_embd].  The router is not read.
        """

    def activate_experts(self, experts: Experts[A, M], x: V, ids: A) -> A:
        """The activations of given experts for each row of x, before their matrix ``down``: activation(gate, up), with their
        factors and biases.  Weights must be those of outputs.

        x: [rows, n_embd].
        ids: int32 [rows, n_used].

        Returns float32 [rows * n_used, n_ff], a row for each expert of the first row of x, then those of the next one.
        """

    def join_experts(self, experts: Experts[A, M], activations: A, ids: A, weights: A) -> A:
        """The weighted sum of the products of activations with the matrix ``down`` of their experts, with its factors and
        biases, for each row, in the order of ids.

        activations: [rows * n_used, n_ff], the result of :meth:`activate_experts`.
        ids: int32 [rows, n_used].
        weights: float32 [rows, n_used].

        Returns float32 [rows, n_embd].
        """

    def add_gated(self, x: A, y: A, gates: A) -> A:
        """x + sigmoid(gate) * y, where the gate of a row is its last element of ``gates``: x, y [rows, n], gates [rows, m].
        Returns float32 [rows, n]."""

    def grouped_matmul(self, x: A, weight: M, n_group: int) -> A:
        """The product of each of the n_group parts of a row with the matrix of its group.

        x: [rows, n_group * K].
        weight: the stacked matrices [R, K] of the groups, [n_group * R, K].

        Returns float32 [rows, n_group * R].
        """

    def repeat(self, x: A, n: int) -> A:
        """Each row of x [rows, width], repeated n times.  Returns float32 [rows, n * width]."""

    def stream_weights(self, m: A, scale: A, base: A, epsilon: float, rounds: int) -> A:
        """The weights of hyper-connections (Xie et al. 2026), computed from z = m * scale + base.

        - The first four weights, for :meth:`collapse`, are sigmoid(z) + epsilon.
        - The next four, for :meth:`expand`, are 2 sigmoid(z).
        - The last sixteen, also for :meth:`expand`, are a 4 x 4 matrix.  It starts as the softmax of each row of z, plus
          epsilon.  Then columns, and after that ``rounds`` - 1 times rows and columns, are divided by their sums + epsilon.

        m: [rows, 24], base: [24], scale: [3], one for each kind of weight; or, for the weights of :meth:`collapse` only,
            m: [rows, 4], base: [4], scale: [1].

        Returns float32 in the shape of m.
        """

    def collapse(self, x: A, weights: A) -> A:
        """The weighted sum of the four streams: x [rows, 4 n], weights [rows, 4 or more].  Returns float32 [rows, n]."""

    def expand(self, x: A, y: A, weights: A) -> A:
        """The streams after a sub-layer: x'_d = b_d y + sum_s C_sd x_s.

        x: [rows, 4 n], the streams before the sub-layer.
        y: [rows, n], the output of the sub-layer.
        weights: [rows, 24]; b is weights 4 to 7, and C is weights 8 to 23.

        Returns float32 [rows, 4 n].
        """

    def columns(self, x: A, begin: int, n: int) -> A:
        """n columns of x [rows, width] from column ``begin`` on.  Returns a new array, float32 [rows, n]."""

    def reinterpret(self, x: A, dtype: DTypeLike) -> A:
        """A view of the memory of x as elements of another type of the same size, of the same shape."""

    def altup_enter(self, x: A, a: A) -> A:
        """The streams of alternating updates (Baykal et al. 2023) before the first layer.

        The first one is x.  The other three are a, each scaled so that its root mean square is that of x.

        x: [rows, n].
        a: [rows, 3 n].

        Returns float32 [rows, 5 n]: the streams, then n zeros.
        """

    def altup_predict(self, x: A, m: A, coef: A) -> A:
        """The streams that are predicted before a layer: p_d = x_d + sum_s C_ds x_s, with C = coef tanh(m).

        x: [rows, 5 n], the streams in the form of :meth:`altup_enter`.
        m: [rows, 4].
        coef: [16, 4]; row 4 d + s is that of C_ds.

        Returns float32 [rows, 5 n].
        """

    def altup_active(self, p: A, y: A, m: A, coef: A, scale: A) -> A:
        """The first stream of :meth:`altup_correct`, multiplied by ``scale`` [n].  Returns float32 [rows, n]."""

    def altup_correct(self, p: A, y: A, m: A, coef: A, first: A) -> A:
        """The streams after a layer: p_d + (1 + c_d) (y - p_0), with c = coef tanh(m), and + first for d > 0.

        p: [rows, 5 n], the predicted streams.
        y: [rows, n], the result of the layer.
        m: [rows, 4].
        coef: [4, 4].
        first: [rows, n].

        Returns float32 [rows, 5 n].
        """

    def altup_leave(self, x: A, a: A) -> A:
        """The mean of four vectors: the first stream of x, and a, each scaled so that its root mean square is that of this
        stream.

        x: [rows, 5 n].
        a: [rows, 3 n].

        Returns float32 [rows, n].
        """

    def sparsify(self, x: A, multiplier: float) -> A:
        """max(x - (mean + multiplier * deviation), 0), with the mean and the standard deviation of each row: x [rows, n].

        Returns a new array, float32 [rows, n].
        """

    def rotate_tail(
        self,
        x: A,
        n_head: int,
        batch: Batch[A],
        table: A,
        norm: A | None = None,
        eps: float = 0.0,
        inverse: bool = False,
    ) -> A:
        """Rotate the last elements of each head of x by position, in pairs of neighbours.

        x: [rows, n_head * d].
        table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position.
        norm: [d], weights by which heads are normalized first; None: they are not normalized.
        inverse: whether to rotate in the opposite direction.

        Returns float32 [rows, n_head * d].
        """

    def keep_latents(self, x: A, memory: CompressedCache[A], batch: Batch[A]) -> None:
        """Store the latents x [rows, d] at the rows' positions."""

    def compress(
        self,
        law: Compressor[A],
        values: A,
        scores: A,
        blocks: Blocks[A],
        batch: Batch[A],
        table: A,
        transposed: bool = False,
    ) -> None:
        """Store the compressed rows of all blocks that end in the pass, and the values and scores for later rows.

        A row is the sum of the values of its tokens, weighted, for each element, by the softmax of their scores + ape.  It is
        then normalized, and rotated as in :meth:`rotate_tail` by the position at which its block begins.

        values, scores: [rows, overlap * d].
        table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position.
        transposed: whether the rows are keys of an indexer.
        """

    def round_latents(self, x: A, n_rot: int) -> A:
        """Round latents x [rows, d] as ds4 does (``engine/cpu/rounding.py``).

        Blocks of 64 elements, except the last ``n_rot`` elements, are scaled by a common power of two and rounded to E4M3.
        Then all elements are rounded to float16.  Returns float32 [rows, d].
        """

    def round_queries(self, q: A, n_head: int) -> A:
        """Round the queries q [rows, n_head * d] of an indexer as ds4 does.

        Each head is multiplied by the Hadamard matrix of order d.  Then blocks of 32 elements are scaled by a common power of
        two and rounded to E2M1.  Returns float32 [rows, n_head * d].
        """

    def round_rows(self, blocks: Blocks[A], ratio: int, n_rot: int, batch: Batch[A], transposed: bool = False) -> None:
        """Round the compressed rows of all blocks that end in the pass, in place.

        The rounding is that of :meth:`round_latents`, or that of :meth:`round_queries` if the rows are ``transposed``.
        ``blocks.rows`` must be float32.
        """

    def keep_keys(self, x: A, keys: PagedRows[A], batch: Batch[A]) -> None:
        """Store the keys x [rows, d] of an indexer at the rows' positions."""

    def choose_rows(
        self, q: A, weights: A, factor: float, ratio: int, top_k: int, keys: PagedRows[A], batch: Batch[A]
    ) -> A:
        """Select, for each row, the ``top_k`` compressed rows with the largest scores; with ratio 1, positions.

        The score of a compressed row is the sum over heads of weights * factor * relu(q . key).  Of rows with equal scores,
        the one with the lower index is preferred.

        q: [rows, n_head * d], rotated.
        weights: [rows, n_head].

        Returns the indices in ascending order, int32 [rows, top_k], filled with -1 if a row sees fewer compressed rows.
        """

    def attend_compressed(
        self,
        q: A,
        memory: CompressedCache[A],
        batch: Batch[A],
        scale: float,
        sinks: A,
        ratio: int,
        chosen: A | None,
    ) -> A:
        """Compute attention of q over the latents of the window and over compressed rows.

        A row sees the compressed rows of the blocks that end at or before its position.  Each latent and each compressed row
        is both the key and the value of all heads.

        q: [rows, n_head * d].
        sinks: [n_head], an additional score of each head's softmax, without a value.
        ratio: the number of positions per compressed row; 0: there are no compressed rows.
        chosen: int32 [rows, top_k], the compressed rows to which each row attends (:meth:`choose_rows`); None: all that it
            sees.

        Returns float32 [rows, n_head * d].
        """

    def plain(self, x: V) -> A:
        """x as an array, which may be used any number of times."""

    def keep_rows(self, ring: A, x: V, batch: Batch[A]) -> None:
        """ring[sequences, positions % length] = x for each row: ring [sequences, length, n], x [rows, n], rows <= length."""

    def beside(self, e: A, hiddens: A, batch: Batch[A]) -> A:
        """Concatenate e and hiddens[sequences, (positions - 1) % length]: e [rows, n], hiddens [sequences, length, m].

        Returns float32 [rows, n + m].
        """

    def mtp_input(self, e: A, e_norm: A, hiddens: A, h_norm: A, batch: Batch[A], eps: float) -> A:
        """Concatenate rms_norm(e, e_norm, eps) and rms_norm(h, h_norm, eps), where h is hiddens[sequences, (positions - 1) %
        length], or 0 at position 0.

        If h consists of s streams, each stream is normalized and concatenated to e in a separate row.

        e: [rows, n].
        e_norm, h_norm: [n].
        hiddens: [sequences, length, s n].

        Returns float32 [rows * s, 2 n].
        """

    def rows_before(self, hiddens: A, batch: Batch[A]) -> A:
        """hiddens[sequences, (positions - 1) % length] for each row, 0 at position 0: hiddens [sequences, length, n].

        Returns float32 [rows, n].
        """

    def join_columns(self, parts: Sequence[A]) -> A:
        """Concatenate the rows of several arrays [rows, n].  Returns float32 [rows, the sum of all n]."""

    def spread_logits(self, logits: A, index: A) -> A:
        """logits[:, index], and ``engine.cpu.taps.UNKNOWN`` where the index is negative: logits [rows, n], index int32
        [n_vocab].  Returns float32 [rows, n_vocab]."""

    def activate(self, activation: Activation, gate: A | None, up: A) -> V:
        """Apply the activation of a feed-forward network to each element: gate, up [rows, n].  Returns float32 [rows, n].

        gate: None if the activation has no gate.
        """

    def softcap(self, x: A, cap: float) -> A:
        """Compute cap * tanh(x / cap) in place.  Returns x."""
