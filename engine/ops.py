"""The operations that forward passes are written against, and what else the engine asks of a device.

Two backends have them: ``engine/cpu/backend.py`` and ``engine/cuda/backend.py``.  Both give the same bits.  Shapes are
[rows, ...], and elements are float32 unless it says otherwise.  A row of a result depends on the same row of the inputs and
on what the caches hold, never on how many rows a pass has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import A, Array, M, Matrix, Pass, V, Value
from engine.cache.kv import KVCache, LayerCache
from engine.cache.recurrent import RecurrentLayer
from engine.compile.jobs import Job
from engine.decode.sampler import Sampler, SamplingParams
from engine.models.config import ModelConfig
from engine.models.delta_net import DeltaNet
from engine.models.experts import Experts
from engine.models.heads import Heads
from engine.models.weights import Weight
from engine.speculative.params import SpeculationParams
from engine.speculative.steps import Steps

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: how far something has come that takes long."""

Forward: TypeAlias = Callable[[Pass[A], int], A | None]
"""A pass, written in operations: ``forward(batch, n_logits)`` gives the logits of the last ``n_logits`` rows, or None.  A
backend may record it once and repeat it, so what it calls depends on the number of rows, never on values."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory: ``allocated`` by this process, ``weights`` among them, and ``free`` for more."""

    allocated: int
    weights: int
    free: int


@dataclass(frozen=True)
class Observation(Generic[A]):
    """Intermediate values of an operation, by name.

    kernel: the GPU kernel that has written them, such as "rope", and ``variant``: the same with its constants, such as
    "rope[f16, f16, 64, 64, ...]"; both "" on the CPU.
    """

    kernel: str
    variant: str
    values: dict[str, A]


Observer: TypeAlias = Callable[[Observation[A]], None]


class Drafter(Protocol[A]):
    """What drafts tokens from the outputs of a model: a layer behind its trunk, or an assistant."""

    @property
    def ops(self) -> Any:
        """The backend that computes it: ``Operations`` of the model's own kind."""

    @property
    def inputs(self) -> Pass[A] | None:
        """Where its passes have their inputs (``Operations.inputs``)."""

    @property
    def hidden(self) -> A:
        """float32 [length, n]: what the trunk has made of the token at position p, in row p % length."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights that a draft reads."""

    def follow(self, batch: Pass[A], hidden: A) -> None:
        """Note that the trunk has made ``hidden`` [rows, n] of the tokens of a pass."""

    def compute(self, batch: Pass[A], n_logits: int) -> A:
        """The logits [1, n_vocab] after one token."""

    def forward(self, token: int, position: int) -> np.ndarray:
        """Logits float32 [n_vocab] for the token after ``token`` at ``position``."""

    def reserve(self, length: int) -> None:
        """Have the rotation angles of positions [0, length) ready."""


class Decoder(Protocol[A]):
    """What a backend asks of a model; ``engine.models.base.Model`` is one."""

    ops: Any
    config: ModelConfig
    cache: KVCache

    @property
    def mtp(self) -> Drafter[A] | None:
        """What drafts from its outputs, if anything does."""

    def compute(self, batch: Pass[A], n_logits: int) -> A | None:
        """The operations of a pass (:data:`Forward`)."""

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int) -> np.ndarray:
        """Run a pass: the logits of its last rows, float32 [n_logits, n_vocab]."""

    def reserve(self, length: int) -> None:
        """Have the rotation angles of positions [0, length) ready."""


class Operations(Protocol[A, V, M]):
    """A backend: its arrays ``A``, its values ``V`` (arrays, or what is computed where it is used), its matrices ``M``.

    Operations of a pass are called inside ``run``, ``warm_up`` or ``steps``.  Memory may be asked for at any time.
    """

    name: str
    """Kind of device: "cpu" or "cuda"."""

    n_threads: int
    """CPU threads that compute; 0 for a GPU."""

    max_rows: int
    """Rows of the largest pass that reads a prompt."""

    ahead_drafted: int
    """Steps with drafts that may be in flight at once."""

    # --- the device --------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The device as reports name it: "cpu", or "cuda:0 NVIDIA H200"."""

    @property
    def gpu_name(self) -> str:
        """The name of the GPU, such as "NVIDIA H200"; "" for the CPU."""

    def device_memory(self) -> DeviceMemory | None:
        """The state of the GPU's memory; None for the CPU, whose weights and caches lie in host memory."""

    def bandwidth(self) -> float:
        """Bytes per second that a plain read of the device's memory reaches, with as many threads as the backend uses.

        It is measured when first asked for: about half a second and a gigabyte on the CPU, milliseconds on a GPU.
        MemoryError or DeviceError where there is no memory left to measure it with.
        """

    def shares_memory_with(self, other: "AnyOperations") -> bool:
        """Whether arrays and queued work are those of one device, so that nothing has to be copied or waited for."""

    def can_reach(self, other: "AnyOperations") -> bool:
        """Whether this kind of device can read arrays of the other kind at all."""

    def reach(self, other: "AnyOperations") -> None:
        """Give kernels of this device access to the memory of another one that ``can_reach`` allows; DeviceError where the
        two are not connected."""

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache once ``weights`` bytes of weights and the intermediate results of a pass have their place;
        0 where the system does not say."""

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention of ``n_head`` heads of ``d_v`` over ``n_ctx`` positions needs beside the cache."""

    def upload(self, array: np.ndarray) -> A:
        """An array of the device with the values, shape and element type of a NumPy array.  DeviceError without room."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> A:
        """A zeroed array that stays.  DeviceError without room."""

    def store(self, target: A, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""

    def download(self, array: A) -> np.ndarray:
        """The values as a NumPy array, once all work that was started before has ended."""

    def weight(self, weight: Weight, host: bool = False) -> M:
        """A weight matrix that the operations can read.  host: leave it in host memory, for a table of which a pass reads
        few rows.  DeviceError without room."""

    def loaded(self) -> None:
        """All weights have been given; release what only loading needed."""

    def inputs(self) -> Pass[A] | None:
        """Memory for the tokens and positions of passes that run between the steps of an answer, int32 [rows] each; None
        where a pass takes them as arguments."""

    # --- passes ------------------------------------------------------------------------------------------------

    def run(
        self, forward: Forward[A], batch: Pass[np.ndarray], n_logits: int, inputs: Pass[A] | None = None
    ) -> np.ndarray | None:
        """Run a pass over the rows of ``batch`` and return its result, float32 [n_logits, n_vocab]; None for no logits.

        inputs: where its tokens and positions go, as ``inputs()`` gave it; None: the backend's own place.
        """

    def next_rows(self, left: int) -> int:
        """How many of the ``left`` tokens of a prompt the next pass should read: 1 to ``max_rows``."""

    def jobs(self, model: Decoder[A]) -> list[Job]:
        """Every kernel that the passes and steps of a model use, as something that any process can compile."""

    def warm_up(self, model: Decoder[A]) -> None:
        """Load these kernels; one that has not been compiled before is compiled here.  The model's cache is written."""

    def observe(self, observer: Observer[A] | None) -> None:
        """Call ``observer`` with intermediate values of operations from now on; None: no more.

        The CPU tells of them inside its operations: "query" in attention, the normalized and rotated queries [rows, n_head,
        d_k]; "convolved" in a delta net, q, k and v of each row side by side, [rows, n_channels].

        A GPU tells of each kernel that ``Backend.start`` starts, once it has ended, with the arrays that it has written;
        their names are those of ``engine.cuda.runtime.tensor.Launch``.
        """

    # --- choosing tokens ---------------------------------------------------------------------------------------

    def can_sample(self, params: SamplingParams) -> bool:
        """Whether ``steps`` can choose tokens with these parameters."""

    def steps(self, model: Decoder[A], sampler: Sampler, params: SpeculationParams) -> Steps:
        """Steps of ``model`` whose tokens the device chooses as ``sampler`` does, and whose drafts it accepts as ``params``
        says.  Only where ``can_sample`` holds."""

    # --- operations of a pass ----------------------------------------------------------------------------------

    def embed(self, table: M, tokens: A, scale: float = 1.0) -> A:
        """table[tokens] * scale: tokens int32 [rows], table [n_vocab, n]; float32 [rows, n]."""

    def matmul(self, x: V, *weights: M) -> list[A]:
        """x @ W^T for each weight W: x [rows, K], W [R, K]; float32 [rows, R] for each.

        Where W is quantized, each unit of 32 or 256 elements of a row of x is first rounded to int8.
        """

    def matmul_add(self, residual: A, x: V, weight: M) -> A:
        """residual + x @ weight^T: residual [rows, R], x [rows, K], weight [R, K]; float32 [rows, R]."""

    def add(self, x: A, y: A) -> A:
        """x + y: x [rows, n], y [rows, n], or a bias [n] that is added to every row."""

    def rms_norm(self, x: A, weight: A, eps: float) -> V:
        """x / sqrt(mean(x^2) + eps) * weight, row by row: x [rows, n], weight [n]; float32 [rows, n]."""

    def rms_norm_add(self, residual: A, x: A, weight: A, eps: float, scale: float = 1.0) -> A:
        """(residual + rms_norm(x, weight, eps)) * scale: residual, x [rows, n], weight [n]; float32 [rows, n]."""

    def per_layer_inputs(self, m: A, e: A, weight: A, scale: float, eps: float) -> A:
        """(rms_norm(m * scale, weight, eps) + e) / sqrt(2), each run of n elements by itself (Gemma 3n's per-layer
        embeddings): m, e [rows, layers * n], weight [n]; float32 [layers, rows, n]."""

    def attention(self, heads: Heads[A], q: A, k: A, v: A, cache: LayerCache[A], batch: Pass[A], table: A) -> V:
        """Store k and v in the cache at the rows' positions, then attend q over the cache up to each row's own position:
        float32 [rows, n_head * d_v].

        softmax(scale * q k^T) v in chunks of 64 positions, each head of q over the key head that its group shares, as far
        back as the cache's window.  Before that, as ``heads`` says: biases are added, heads of q, k and v are normalized, and
        q and k are rotated by ``table``, float32 [n_ctx, 2, n_rot / 2] of cosines and sines by position.

        q [rows, n_head * d_k], k [rows, n_head_kv * d_k], v [rows, n_head_kv * d_v]; v may be k.  Where heads are gated, q is
        [rows, n_head * 2 * d_k], queries before gates in each head, and the result is multiplied by sigmoid(gates).
        """

    def attend_past(
        self, heads: Heads[A], q: A, cache: LayerCache[A], batch: Pass[A], last: A, table: A, window: int
    ) -> V:
        """Attend q [rows, n_head * d_k], rotated for the rows' positions, over what the cache holds up to position ``last``
        int32 [rows] of each row, as far back as ``window`` positions (0: all): float32 [rows, n_head * d_v].  Nothing is
        stored."""

    def remember(self, heads: Heads[A], k: A, v: A, cache: LayerCache[A], batch: Pass[A], table: A) -> None:
        """Store k [rows, n_head_kv * d_k] and v [rows, n_head_kv * d_v] in the cache at the rows' positions, after biases,
        normalization and rotation as in ``attention``.  v may be k."""

    def delta_net(self, net: DeltaNet[A], x: A, gates: Sequence[A], memory: RecurrentLayer[A], batch: Pass[A]) -> A:
        """The gated delta rule (Yang et al. 2024): x [rows, n_channels] goes through a causal convolution and silu, becomes
        q, k, v, and q and k are normalized; then for each value head, with its state S [d, d], row by row,
        S = exp(a * softplus(alpha + dt)) S;  S_j = S_j + sigmoid(beta) (v_j - S_j . k) k;  o_j = S_j . q.
        float32 [rows, n_v * d].

        gates: alpha and beta, each [rows, n_v], or both side by side as one [rows, 2 n_v].  ``memory`` gives the state before
        the first row's position and keeps those after the rows.
        """

    def gated_norm(self, x: A, weight: A, gate: A, eps: float) -> V:
        """rms_norm of each run of weight.size elements of x, times silu(gate): x, gate [rows, n], weight [d], d divides n;
        float32 [rows, n]."""

    def experts(self, experts: Experts[A, M], residual: A | None, x: V, router_x: V | None = None) -> A:
        """residual + the weighted sum of what the ``n_used`` likeliest experts make of x [rows, n_embd]; without the
        residual where it is None.  float32 [rows, n_embd].

        Experts are chosen by softmax(router_x @ router^T), and their weights made to add up to 1, then multiplied by
        ``experts.scales`` where there are any; router_x: x where it is None.  A shared network is added where there is one,
        times sigmoid of the router's last output.  ModelError for an activation that the backend does not know.
        """

    def plain(self, x: V) -> A:
        """x as an array, which may be used more than once."""

    def keep_rows(self, ring: A, x: V, batch: Pass[A]) -> None:
        """ring[positions % length] = x, row by row: ring [length, n], x [rows, n], rows <= length."""

    def beside(self, e: A, hiddens: A, batch: Pass[A]) -> A:
        """[e, hiddens[(positions - 1) % length]] side by side: e [rows, n], hiddens [length, m]; float32 [rows, n + m]."""

    def mtp_input(self, e: A, e_norm: A, hiddens: A, h_norm: A, batch: Pass[A], eps: float) -> A:
        """[rms_norm(e, e_norm, eps), rms_norm(h, h_norm, eps)] side by side, h = hiddens[(positions - 1) % length], or 0 at
        position 0: e [rows, n], hiddens [length, n], norms [n]; float32 [rows, 2 n]."""

    def swiglu(self, gate: A, up: A) -> V:
        """silu(gate) * up, element by element: [rows, n]."""

    def geglu(self, gate: A, up: A) -> V:
        """gelu(gate) * up, element by element, gelu by its tanh approximation: [rows, n]."""

    def softcap(self, x: A, cap: float) -> A:
        """cap * tanh(x / cap), in place; returns x."""


AnyOperations: TypeAlias = Operations[Any, Any, Any]
"""Some backend, which one does not matter."""

Ops: TypeAlias = Operations[Array, Value, Matrix]
"""The operations of whatever device, as models and all that is above them see a backend."""
