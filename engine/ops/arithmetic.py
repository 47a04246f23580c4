"""The arithmetic of a forward pass: what every backend computes, with the same bits.

Shapes are [rows, ...], and elements are float32 unless stated otherwise.  A row of a result depends on the same row of the
inputs and on the contents of the caches, never on the number of rows in the pass.
"""

from collections.abc import Sequence
from typing import Protocol

from engine.arrays import A, Batch, M, V
from engine.cache.compressed import Blocks, CompressedCache
from engine.cache.kv import AttentionCache
from engine.cache.latent import LatentCache
from engine.cache.recurrent import RecurrentCache
from engine.ops.activation import Activation
from engine.ops.compressor import Compressor
from engine.ops.delta_net import DeltaNet
from engine.ops.experts import Experts
from engine.ops.heads import Heads
from engine.ops.latent import Latent


class Arithmetic(Protocol[A, V, M]):
    """The operations of a pass on arrays ``A``, values ``V`` (arrays or deferred results) and matrices ``M``.

    They are called inside ``run``, ``warm_up`` or ``steps``.
    """

    def embed(self, table: M, tokens: A, scale: float = 1.0) -> A:
        """table[tokens] * scale: tokens int32 [rows], table [n_vocab, n]; float32 [rows, n]."""

    def matmul(self, x: V, *weights: M) -> list[A]:
        """x @ W^T for each weight W: x [rows, K], W [R, K]; float32 [rows, R] for each.

        Where W is quantized, each unit of 32 or 256 elements of a row of x is first rounded to int8.
        """

    def matmul_add(self, residual: A, x: V, weight: M, bias: A | None = None) -> A:
        """residual + (x @ weight^T + bias): residual [rows, R], x [rows, K], weight [R, K], bias [R]; float32 [rows, R]."""

    def add(self, x: A, y: A, scale: float = 1.0) -> A:
        """x + scale * y: x [rows, n], y [rows, n], or a bias [n] that is added to every row."""

    def scale(self, x: A, factor: float) -> A:
        """x * factor: float32 [rows, n], a new array."""

    def rms_norm(self, x: A, weight: A, eps: float) -> V:
        """x / sqrt(mean(x^2) + eps) * weight, row by row: x [rows, n], weight [n]; float32 [rows, n]."""

    def rms_norm_add(self, residual: A, x: A, weight: A, eps: float, scale: float = 1.0) -> A:
        """(residual + rms_norm(x, weight, eps)) * scale: residual, x [rows, n], weight [n]; float32 [rows, n]."""

    def per_layer_inputs(self, m: A, e: A, weight: A, scale: float, eps: float) -> A:
        """(rms_norm(m * scale, weight, eps) + e) / sqrt(2), each run of n elements by itself (Gemma 3n's per-layer
        embeddings): m, e [rows, layers * n], weight [n]; float32 [layers, rows, n]."""

    def attention(
        self, heads: Heads[A], q: A, k: A, v: A, cache: AttentionCache[A], batch: Batch[A], table: A | None
    ) -> V:
        """Store k and v in the cache at the rows' positions, then attend q over the cache up to each row's own position:
        float32 [rows, n_head * d_v].

        The result is softmax(scale * q k^T) v, computed in chunks of 64 positions, as far back as the cache's window.  Each
        head of q reads the key head of its group.  First, depending on ``heads``, biases are added, heads of q, k and v are
        normalized, q and k are rotated by ``table``, float32 [n_ctx, 2, n_rot / 2] of cosines and sines by position, or not
        if that is None, and q is multiplied by a factor of its position.  Heads may have a sink, one more score of their
        softmax that has no value.

        q [rows, n_head * d_k], k [rows, n_head_kv * d_k], v [rows, n_head_kv * d_v]; v may be k.  If heads are gated, q is
        [rows, n_head * 2 * d_k], queries before gates in each head, and the result is multiplied by sigmoid(gates).
        """

    def attend_past(
        self, heads: Heads[A], q: A, cache: AttentionCache[A], batch: Batch[A], last: A, table: A | None, window: int
    ) -> V:
        """Attend q [rows, n_head * d_k], rotated by the rows' positions unless ``table`` is None, over the cached positions
        up to ``last`` int32 [rows] of each row, at most ``window`` positions back (0: all): float32 [rows, n_head * d_v].
        Nothing is stored."""

    def remember(self, heads: Heads[A], k: A, v: A, cache: AttentionCache[A], batch: Batch[A], table: A | None) -> None:
        """Store k [rows, n_head_kv * d_k] and v [rows, n_head_kv * d_v] in the cache at the rows' positions, after the
        biases, normalization and rotation of ``attention``.  v may be k."""

    def latent_attention(
        self, latent: Latent[A, M], q: A, q_rope: A, c: A, k_rope: A, cache: LatentCache[A], batch: Batch[A]
    ) -> A:
        """Store what ``remember_latent`` stores, then attend all heads over the latents up to each row's own position:
        float32 [rows, n_head * d_v].

        q [rows, n_head * n_nope] and q_rope [rows, n_head * n_rope] are the two parts of the queries; q_rope is rotated by
        position.  A head's query is [k_b_h q_h, q_rope_h], a key is all of what is stored for a position, a value its first
        ``rank`` elements.  The result of head h, softmax(scale * query keys^T) values as in ``attention``, is multiplied by
        its matrix v_b_h.
        """

    def remember_latent(self, latent: Latent[A, M], c: A, k_rope: A, cache: LatentCache[A], batch: Batch[A]) -> None:
        """Store [rms_norm(c), k_rope rotated by position] at the rows' positions: c [rows, rank], k_rope [rows, n_rope]."""

    def delta_net(self, net: DeltaNet[A], x: A, gates: Sequence[A], memory: RecurrentCache[A], batch: Batch[A]) -> A:
        """The gated delta rule (Yang et al. 2024): x [rows, n_channels] passes through a causal convolution and silu and is
        split into q, k and v; q and k are normalized; then for each value head, with its state S [d, d] and the queries and
        keys of the head that ``net`` assigns to it, row by row,
        S = exp(a * softplus(alpha + dt)) S;  S_j = S_j + sigmoid(beta) (v_j - S_j . k) k;  o_j = S_j . q.
        float32 [rows, n_v * d].

        gates: alpha and beta, each [rows, n_v], or both concatenated, [rows, 2 n_v].
        memory: holds the state before the position of the first row, and receives the states after the rows.
        """

    def gated_norm(self, x: A, weight: A, gate: A, eps: float) -> V:
        """rms_norm of each run of d elements of x, times silu(gate): x, gate [rows, n], weight [d], d divides n; float32
        [rows, n]."""

    def experts(
        self, experts: Experts[A, M], residual: A | None, x: V, router_x: V | None = None, tokens: A | None = None
    ) -> A:
        """residual + the weighted sum of the outputs of the ``n_used`` best experts for x [rows, n_embd], without a residual
        if that is None: float32 [rows, n_embd].

        Experts are chosen by router_x @ router^T and the law of ``experts.routing``; router_x None: x.  tokens: int32 [rows],
        needed where ``experts.given`` is a table.  Weights are multiplied by ``experts.scales`` unless that is None.  A
        shared network, if present, is added, multiplied by sigmoid(the router's last output) if ``experts.shared_gated``.
        """

    def grouped_matmul(self, x: A, weight: M, n_group: int) -> A:
        """The parts of each row of x [rows, n_group * K] times the matrices of their groups, stacked as [n_group * R, K]:
        float32 [rows, n_group * R]."""

    def repeat(self, x: A, n: int) -> A:
        """Each row of x [rows, width], n times: float32 [rows, n * width]."""

    def stream_weights(self, m: A, scale: A, base: A, epsilon: float, rounds: int) -> A:
        """The weights of hyper-connections (Xie et al. 2026), four of ``collapse``, four and sixteen of ``expand``, from
        z = m * scale + base: sigmoid(z) + epsilon; 2 sigmoid(z); and the softmax of each row of four + epsilon, with columns,
        then ``rounds`` - 1 times rows and columns, divided by their sums + epsilon.  m float32 [rows, 24], base [24], scale
        [3]; or [rows, 4], [4], [1] for ``collapse`` only; float32 like m."""

    def collapse(self, x: A, weights: A) -> A:
        """The weighted sum of streams: x [rows, 4 n], weights [rows, 4 or more]; float32 [rows, n]."""

    def expand(self, x: A, y: A, weights: A) -> A:
        """The streams after a sub-layer, x'_d = b_d y + sum_s C_sd x_s with b and C the weights from the fifth on: x [rows,
        4 n] before it, y [rows, n] its output, weights [rows, 24]; float32 [rows, 4 n]."""

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
        """The heads of x [rows, n_head * d], normalized if there are weights ``norm`` [d], their last elements rotated by
        position in pairs of neighbours, or back if ``inverse``: float32 [rows, n_head * d]."""

    def keep_latents(self, x: A, memory: CompressedCache[A], batch: Batch[A]) -> None:
        """Store latents x [rows, d] at the rows' positions."""

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
        """Store the compressed rows of all blocks that end in the pass, and what later rows are made of: values, scores
        [rows, overlap * d].  A row is the sum of the values of its tokens, weighted by the softmax of their scores + ape,
        element by element, normalized and rotated as in ``rotate_tail`` by the position at which its block begins.
        ``transposed``: the rows are keys of an indexer."""

    def round_latents(self, x: A, n_rot: int) -> A:
        """Latents x [rows, d] as ds4 rounds them: blocks of 64 elements before the last ``n_rot`` to E4M3 by a common power
        of two, then everything to float16 (``engine/cpu/rounding.py``): float32 [rows, d]."""

    def round_queries(self, q: A, n_head: int) -> A:
        """An indexer's queries q [rows, n_head * d] as ds4 rounds them: times the Hadamard matrix of order d, then blocks of
        32 elements to E2M1 by a common power of two: float32 [rows, n_head * d]."""

    def round_rows(self, blocks: Blocks[A], ratio: int, n_rot: int, batch: Batch[A], transposed: bool = False) -> None:
        """Round the compressed rows of all blocks that end in the pass like latents, or like queries if they are
        ``transposed``, in place: blocks.rows float32."""

    def choose_rows(
        self, q: A, weights: A, factor: float, ratio: int, top_k: int, keys: Blocks[A], batch: Batch[A]
    ) -> A:
        """The ``top_k`` compressed rows of each row with the largest sums of weights * factor * relu(q . key) over heads, the
        lower one where sums are equal: q [rows, n_head * d], rotated, weights [rows, n_head]; int32 [rows, top_k], in rising
        order, -1 where a row sees fewer."""

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
        """Attend q [rows, n_head * d] over the latents of the window and the compressed rows of blocks that end before or at
        the row's position, or of these the ``chosen`` ones: float32 [rows, n_head * d].  Each latent and row is the key and
        the value of all heads; ``sinks`` [n_head] are further scores; ratio 0: there are no compressed rows."""

    def plain(self, x: V) -> A:
        """x as an array, which may be used any number of times."""

    def keep_rows(self, ring: A, x: V, batch: Batch[A]) -> None:
        """ring[sequences, positions % length] = x, row by row: ring [sequences, length, n], x [rows, n], rows <= length."""

    def beside(self, e: A, hiddens: A, batch: Batch[A]) -> A:
        """[e, hiddens[sequences, (positions - 1) % length]], concatenated: e [rows, n], hiddens [sequences, length, m];
        float32 [rows, n + m]."""

    def mtp_input(self, e: A, e_norm: A, hiddens: A, h_norm: A, batch: Batch[A], eps: float) -> A:
        """[rms_norm(e, e_norm, eps), rms_norm(h, h_norm, eps)], concatenated, where h is hiddens[sequences, (positions - 1) %
        length], or 0 at position 0: e [rows, n], hiddens [sequences, length, n], norms [n]; float32 [rows, 2 n].  If h has s
        streams, hiddens [sequences, length, s n], each of them is normalized and follows e in a row of its own: float32
        [rows * s, 2 n]."""

    def activate(self, activation: Activation, gate: A | None, up: A) -> V:
        """The activation of a feed-forward network, element by element: gate, up [rows, n]; float32 [rows, n].  gate: None if
        the activation has none."""

    def softcap(self, x: A, cap: float) -> A:
        """cap * tanh(x / cap), in place; returns x."""
