"""The operations that forward passes are written against, and the other services of a device.

Two backends implement them: ``engine/cpu/backend.py`` and ``engine/cuda/backend.py``.  Both give the same bits.  Shapes are
[rows, ...], and elements are float32 unless stated otherwise.  A row of a result depends on the same row of the inputs and
on the contents of the caches, never on the number of rows in the pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import A, Array, Batch, M, Matrix, V, Value
from engine.cache.compressed import Blocks, CompressedCache
from engine.cache.kv import AttentionCache, KVCache
from engine.cache.latent import LatentCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.compile.jobs import Job
from engine.models.config import ModelConfig
from engine.ops.activation import Activation
from engine.ops.compressor import Compressor
from engine.ops.delta_net import DeltaNet
from engine.ops.experts import Experts
from engine.ops.heads import Heads
from engine.ops.latent import Latent
from engine.ops.weight import Weight
from engine.sampling.sampler import SamplingParams
from engine.speculative.steps import Steps

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)`` reports the progress of a long operation."""

Forward: TypeAlias = Callable[[Batch[A], int], A | None]
"""A pass, written in operations: ``forward(batch, n_logits)`` returns the logits of the last ``n_logits`` rows, or None.  A
backend may record it once and replay it, so the operations it calls may depend on the number of rows, never on values."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory: ``allocated`` by this process (including ``weights``), and ``free``."""

    allocated: int
    weights: int
    free: int


@dataclass(frozen=True)
class Observation(Generic[A]):
    """Intermediate values of an operation, by name.

    kernel: the GPU kernel that wrote them, such as "rope"; "" on the CPU.
    variant: the kernel with its constants, such as "rope[f16, f16, 64, 64, ...]"; "" on the CPU.
    values: the arrays by name.
    """

    kernel: str
    variant: str
    values: dict[str, A]


Observer: TypeAlias = Callable[[Observation[A]], None]


class Drafter(Protocol[A]):
    """A network that drafts tokens from the outputs of a model: a layer after its trunk, or an assistant."""

    @property
    def ops(self) -> Any:
        """The backend that computes the drafts: ``Operations`` of the same kind as the model's."""

    @property
    def inputs(self) -> Batch[A] | None:
        """Memory for the inputs of its passes (``Operations.inputs``)."""

    @property
    def hidden(self) -> A:
        """Outputs of the trunk, float32 [sequences, length, n]: row p % length of a sequence is that of the token at position
        p."""

    @property
    def n_bytes(self) -> int:
        """Bytes of weights that one draft reads."""

    def follow(self, batch: Batch[A], hidden: A) -> None:
        """Store the outputs ``hidden`` [rows, n] of the trunk for the tokens of a pass."""

    def compute(self, batch: Batch[A], n_logits: int) -> A:
        """Logits after one token: float32 [1, n_vocab]."""

    def forward(self, token: int, position: int, sequence: TokenSequence | None = None) -> np.ndarray:
        """Logits float32 [n_vocab] for the token after ``token`` at ``position`` of a sequence; None: the one in slot 0."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""


class Decoder(Protocol[A]):
    """The interface of a model that a backend uses; ``engine.models.base.Model`` implements it."""

    ops: Any
    config: ModelConfig
    cache: KVCache
    sequence: TokenSequence

    @property
    def drafter(self) -> Drafter[A] | None:
        """The network that drafts from its outputs, or None."""

    def compute(self, batch: Batch[A], n_logits: int) -> A | None:
        """The operations of a pass (:data:`Forward`)."""

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, n_logits: int, sequence: TokenSequence | None = None
    ) -> np.ndarray:
        """Run a pass and return the logits of its last rows, float32 [n_logits, n_vocab]."""

    def forward_many(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass of several sequences and return the logits of the rows of each."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""


class SplitPass(Protocol):
    """A pass over a part of a prompt, started in pieces, so that steps can run between them.  It computes the same bits as in
    one piece."""

    pieces: int
    """The number of pieces, at least 1."""

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces; returns how many are left."""

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows of the pass, all of which has been started, float32 [n_logits, n_vocab]; None if none
        are wanted.  wait: whether to wait for the pass in any case."""

    def cancel(self) -> None:
        """Start no further piece.  What the pass should have stored is undefined."""


class Operations(Protocol[A, V, M]):
    """A backend with arrays ``A``, values ``V`` (arrays or deferred results) and matrices ``M``.

    Operations of a pass are called inside ``run``, ``warm_up`` or ``steps``.  Memory may be requested at any time.
    """

    name: str
    """Kind of device: "cpu" or "cuda"."""

    n_threads: int
    """The number of CPU threads that compute; 0 for a GPU."""

    max_rows: int
    """The number of rows of the largest pass that reads a prompt."""

    splits: bool
    """Whether passes of many rows have several pieces (``split``)."""

    ahead_drafted: int
    """The number of steps with drafts that may be in flight at once."""

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The name of the device in reports, such as "cpu" or "cuda:0 NVIDIA H200"."""

    @property
    def gpu_name(self) -> str:
        """The name of the GPU, such as "NVIDIA H200"; "" for the CPU."""

    def device_memory(self) -> DeviceMemory | None:
        """The state of the GPU's memory; None for the CPU, which keeps weights and caches in host memory."""

    def bandwidth(self) -> float:
        """Bytes per second of a plain read of the device's memory, with the backend's number of threads.

        The first call measures it: this takes about half a second and a gigabyte on the CPU, milliseconds on a GPU.
        Raises MemoryError or DeviceError if too little memory is free for the measurement.
        """

    def shares_memory_with(self, other: "AnyOperations") -> bool:
        """Whether both backends share arrays and one queue of work, so that neither copies nor waits are needed."""

    def can_reach(self, other: "AnyOperations") -> bool:
        """Whether this kind of device can read arrays of the other kind."""

    def reach(self, other: "AnyOperations") -> None:
        """Give kernels of this device access to the memory of another one for which ``can_reach`` is true.  Raises
        DeviceError if the two devices are not connected."""

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes that remain for a cache after ``weights`` bytes of weights and the intermediate results of a pass; 0 if
        unknown."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention of ``n_head`` heads of size ``d_v`` over ``n_ctx`` positions needs besides the cache."""

    def latent_scratch_bytes(self, n_head: int, rank: int, n_ctx: int, rows: int) -> int:
        """Bytes that attention of ``n_head`` heads over latents of ``rank`` elements at ``n_ctx`` positions needs besides the
        cache, in passes of up to ``rows`` rows."""

    def buffer_bytes(self) -> int:
        """Bytes of memory for the intermediate results of passes."""

    def rest(self, cache: KVCache) -> None:
        """Give memory back to the system that holds nothing while no pass runs: free pages of a cache, intermediate results.
        No pass may be running."""

    def resume(self, cache: KVCache) -> None:
        """Prepare for passes after :meth:`rest`.  Passes may also run without it, but more slowly."""

    def upload(self, array: np.ndarray) -> A:
        """A device array with the values, shape and dtype of a NumPy array.  Raises DeviceError if memory runs out."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> A:
        """A zeroed array that outlives the pass.  Raises DeviceError if memory runs out."""

    def store(self, target: A, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""

    def download(self, array: A) -> np.ndarray:
        """The values as a NumPy array, after all work started earlier has ended."""

    def weight(self, weight: Weight, host: bool = False) -> M:
        """A weight matrix that the operations can read.  Raises DeviceError if memory runs out.

        host: keep it in host memory, for a table of which a pass reads only a few rows.
        """

    def loading(self, tensors: Sequence[np.ndarray], progress: Progress | None) -> None:
        """Prepare to load the tensors of a file.  ``progress("load", done, total)`` is called as their bytes are read, now or
        by ``loaded``."""

    def load_jobs(self) -> list[Job]:
        """Compile jobs of kernels that ``loaded`` uses, which may be compiled before it is called."""

    def loaded(self) -> None:
        """Complete the loading of all matrices, and release memory that only loading needs.  Call it after the last
        ``weight``."""

    def inputs(self) -> Batch[A] | None:
        """Memory for the tokens and positions of passes that run between the steps of an answer, int32 [rows] each; None
        if passes take them as arguments."""

    # --- passes ------------------------------------------------------------------------------------------------

    def run(
        self, forward: Forward[A], batch: Batch[np.ndarray], n_logits: int, inputs: Batch[A] | None = None
    ) -> np.ndarray | None:
        """Run a pass over the rows of ``batch`` and return its result, float32 [n_logits, n_vocab]; None for no logits.

        inputs: the memory for its tokens and positions, from ``inputs()``; None: the backend's own.
        """

    def split(self, forward: Forward[A], batch: Batch[np.ndarray], n_logits: int) -> SplitPass:
        """The pass over the rows of ``batch``, to be started in pieces.  Any other pass may run between two of them, and if
        that needs the memory of this one, it lets this one end first."""

    def next_rows(self, left: int, beside: bool = False) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read: 1 to ``max_rows``;
        beside: whether steps of answers run between its pieces."""

    def jobs(self, model: Decoder[A]) -> list[Job]:
        """A compile job for every kernel that the passes and steps of a model use; any process can run it."""

    def warm_up(self, model: Decoder[A]) -> None:
        """Load the kernels of ``jobs``, and compile those that are not compiled yet.  Overwrites the model's cache."""

    def expect_drafts(self) -> None:
        """Choose kernels that are fast for passes of a few rows, which verify drafts."""

    def observe(self, observer: Observer[A] | None) -> None:
        """Call ``observer`` with intermediate values of all further operations; None: stop.

        The CPU reports values inside its operations: "query" in attention, the normalized and rotated queries [rows, n_head,
        d_k]; "convolved" in a delta net, q, k and v of each row, concatenated: [rows, n_channels].

        A GPU reports each kernel that ``Backend.start`` starts, once it has ended, with the arrays that it wrote.  Their
        names are those of ``engine.cuda.runtime.tensor.Launch``.
        """

    # --- choosing tokens ---------------------------------------------------------------------------------------

    def can_sample(self, params: SamplingParams) -> bool:
        """Whether ``steps`` can choose tokens with these parameters."""

    def steps(self, model: Decoder[A]) -> Steps:
        """Steps of ``model`` whose tokens the device chooses.  Answers may take part for which ``can_sample`` is true."""

    # --- operations of a pass ----------------------------------------------------------------------------------

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


AnyOperations: TypeAlias = Operations[Any, Any, Any]
"""A backend of any kind."""

Ops: TypeAlias = Operations[Array, Value, Matrix]
"""A backend of any device, as models and the layers above them see it."""
