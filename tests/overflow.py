"""Operations with a number that is not finite, or whose square is not, in one row: what must show in the row's result.

Each case runs an operation on three rows; ``bad`` is in row ROW.  The rows before it must have the bits that they have
without it, and row ROW must have something that is not finite.  ``tests/cpu/test_overflow.py`` runs the cases on the CPU,
``tests/cuda/simulated/test_overflow.py`` in the simulator, ``tests/cuda/test_device_overflow.py`` on a GPU.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.arrays import Batch
from engine.cache.compressed import CompressedCacheSpec
from engine.cache.kv import AttentionCacheSpec
from engine.cache.latent import LatentCacheSpec
from engine.cache.mamba import MambaCacheSpec
from engine.cache.recurrent import RecurrentCacheSpec
from engine.cache.short_conv import ShortConvCacheSpec
from engine.cache.types import F16, F32, Types, cache_type
from engine.gguf.quants import FORMATS
from engine.models.kda_config import KDAConfig
from engine.ops.activation import KINDS, SWIGLU, Activation
from engine.ops.compressor import Compressor
from engine.ops.delta_net import DeltaNet
from engine.ops.heads import Heads
from engine.ops.kda import KDA
from engine.ops.latent import Latent
from engine.ops.mamba import Mamba
from engine.ops.weight import Weight
from tests.activations import EVERY_ACTIVATION
from tests.mixtures import on_device, random_experts
from tests.pages import layer_of

F = np.float32
ROWS, ROW = 3, 2
NOT_FINITE = (math.inf, -math.inf, math.nan)
SQUARES = (*NOT_FINITE, 1e20, -3e38)
"""Numbers whose squares float32 does not have."""


class Device(Protocol):
    """Where cases run.  ``ops``: its operations."""

    ops: Any

    def up(self, array: np.ndarray) -> Any:
        """An array in its memory."""

    def matrix(self, weight: Weight) -> Any:
        """A matrix in its memory."""

    def run(self, operation: Callable[[], Any]) -> list[np.ndarray]:
        """The results of an operation."""

    def memory(self, shape: Any, n_ctx: int, types: Types) -> Any:
        """The zeroed memory of a layer."""


class OnCpu:
    """The CPU."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def up(self, array: np.ndarray) -> Any:
        """The array."""
        return array

    def matrix(self, weight: Weight) -> Any:
        """The matrix."""
        return weight

    def run(self, operation: Callable[[], Any]) -> list[np.ndarray]:
        """The results of an operation."""
        found = operation()
        return found if isinstance(found, list) else [found]

    def memory(self, shape: Any, n_ctx: int, types: Types) -> Any:
        """The zeroed memory of a layer."""
        return layer_of(shape, n_ctx, 32, types, np.zeros)


class OnGpu:
    """A GPU, or one in the simulator."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops

    def up(self, array: np.ndarray) -> Any:
        """An array in its memory."""
        return self.ops.upload(np.ascontiguousarray(array))

    def matrix(self, weight: Weight) -> Any:
        """A matrix in its memory."""
        return self.ops.weight(weight)

    def run(self, operation: Callable[[], Any]) -> list[np.ndarray]:
        """The results of an operation, one launch after the other."""
        plan = self.ops.record(operation)
        self.ops.start(plan)
        return [self.ops.download(x) for x in (plan.result if isinstance(plan.result, list) else [plan.result])]

    def memory(self, shape: Any, n_ctx: int, types: Types) -> Any:
        """The zeroed memory of a layer."""
        return layer_of(shape, n_ctx, 32, types, self.ops.zeros, self.ops.store)


Rows = Callable[[Device, float | None], list[np.ndarray]]
"""The results of a case, [ROWS, ..]; None: without a bad number."""


_CLEAN: dict[tuple[str, type], list[np.ndarray]] = {}
"""The results of cases without a bad number."""


@dataclass(frozen=True)
class Case:
    """An operation and the numbers to try."""

    name: str
    rows: Rows
    numbers: tuple[float, ...] = NOT_FINITE

    def check(self, device: Device, bad: float) -> None:
        """Run the case."""
        known = self.name, type(device.ops)
        if known not in _CLEAN:
            _CLEAN[known] = self.rows(device, None)
        clean, found = _CLEAN[known], self.rows(device, bad)
        assert all(np.isfinite(x).all() for x in clean), "the case itself"
        assert clean[0].shape[0] > ROW
        for one, other in zip(clean, found, strict=True):
            assert one[:ROW].tobytes() == other[:ROW].tobytes(), "rows without it"
        assert not all(np.isfinite(x[ROW]).all() for x in found), "the row itself"


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(F)


def with_bad(x: np.ndarray, bad: float | None, at: int = 5) -> np.ndarray:
    """x [ROWS, n] with a bad number in row ROW, unless it is None."""
    x = x.copy()
    if bad is not None:
        x[ROW, at] = bad
    return x


def weight(name: str, rows: int, columns: int) -> Weight:
    """Random rows of a format."""
    entry, values = FORMATS[T[name]], draw(rows, columns)
    if entry.quantized:
        import gguf

        return Weight("w", entry, columns, gguf.quants.quantize(values, entry.type))
    data = {"F32": values, "F16": values.astype(np.float16)}[name]
    return Weight("w", entry, columns, data.view(np.uint8))


def rows_from(first: int, device: Device, n: int = ROWS) -> Batch[Any]:
    """A pass of n rows of a sequence from a position on."""
    at = np.arange(first, first + n, dtype=np.int32)
    tokens = slots = np.zeros(n, np.int32)
    return Batch(device.up(tokens), device.up(at), device.up(slots))


# --- norms -----------------------------------------------------------------------------------------------------


def rms_norm(device: Device, bad: float | None) -> list[np.ndarray]:
    x, w = device.up(with_bad(draw(ROWS, 40), bad)), device.up(draw(40))
    return device.run(lambda: device.ops.plain(device.ops.rms_norm(x, w, 1e-6)))


def layer_norm(device: Device, bad: float | None) -> list[np.ndarray]:
    x, w = device.up(with_bad(draw(ROWS, 40), bad)), device.up(draw(40))
    return device.run(lambda: device.ops.plain(device.ops.layer_norm(x, w, w, 1e-6)))


def layer_norm_of_a_product(device: Device, bad: float | None) -> list[np.ndarray]:
    x, w, m = device.up(with_bad(draw(ROWS, 96), bad)), device.up(draw(96)), device.matrix(weight("Q8_0", 3, 96))
    return device.run(lambda: device.ops.matmul(device.ops.layer_norm(x, w, None, 1e-6), m))


def norm_of_a_product(device: Device, bad: float | None) -> list[np.ndarray]:
    x, w, m = device.up(with_bad(draw(ROWS, 96), bad)), device.up(draw(96)), device.matrix(weight("Q8_0", 3, 96))
    return device.run(lambda: device.ops.matmul(device.ops.rms_norm(x, w, 1e-6), m))


def added_norm(device: Device, bad: float | None) -> list[np.ndarray]:
    x, r, w = device.up(with_bad(draw(ROWS, 96), bad)), device.up(draw(ROWS, 96, seed=1)), device.up(draw(96))
    return device.run(lambda: device.ops.rms_norm_add(r, x, w, 1e-6, 0.7))


def added_norm_of_a_product(device: Device, bad: float | None) -> list[np.ndarray]:
    """Both norms of one kernel: the bad number is in what is added."""
    x, r = device.up(draw(ROWS, 96)), device.up(with_bad(draw(ROWS, 96, seed=1), bad))
    v, w, m = device.up(draw(96)), device.up(draw(96, seed=2)), device.matrix(weight("Q8_0", 3, 96))

    def operation() -> Any:
        y = device.ops.rms_norm_add(r, x, v, 1e-6, 0.7)
        return device.ops.matmul(device.ops.rms_norm(y, w, 1e-6), m)

    return device.run(operation)


def per_layer(device: Device, bad: float | None) -> list[np.ndarray]:
    m, e, w = device.up(with_bad(draw(ROWS, 3 * 32), bad)), device.up(draw(ROWS, 3 * 32, seed=1)), device.up(draw(32))
    found = device.run(lambda: device.ops.per_layer_inputs(m, e, w, 1.0, 1e-6))
    return [np.ascontiguousarray(found[0].transpose(1, 0, 2))]


def gated_norm(device: Device, bad: float | None) -> list[np.ndarray]:
    x, gate, w = device.up(with_bad(draw(ROWS, 64), bad)), device.up(draw(ROWS, 64, seed=1)), device.up(draw(32))
    return device.run(lambda: device.ops.plain(device.ops.gated_norm(x, w, gate, 1e-6)))


def norm_of_a_tail(device: Device, bad: float | None) -> list[np.ndarray]:
    x, w, table = device.up(with_bad(draw(ROWS, 3 * 24), bad)), device.up(draw(24)), device.up(draw(9, 2, 4))
    batch = rows_from(4, device)
    return device.run(lambda: device.ops.rotate_tail(x, 3, batch, table, w, 1e-6))


def mtp_input(device: Device, bad: float | None) -> list[np.ndarray]:
    e, ring, one, other = (
        device.up(x) for x in (with_bad(draw(ROWS, 40), bad), draw(1, 9, 40), draw(40), draw(40, seed=1))
    )
    batch = rows_from(4, device)
    return device.run(lambda: device.ops.mtp_input(e, one, ring, other, batch, 1e-6))


# --- products, activations -------------------------------------------------------------------------------------


def product_with(name: str, columns: int) -> Rows:
    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        x, m = device.up(with_bad(draw(ROWS, columns), bad)), device.matrix(weight(name, 5, columns))
        return device.run(lambda: device.ops.matmul(x, m))

    return rows


def activation(act: Activation, gate: bool, product: bool) -> Rows:
    """The bad number in the gate, or in what it multiplies; followed by a product, or not."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        g, u = draw(ROWS, 96), draw(ROWS, 96, seed=1)
        g, u = (with_bad(g, bad), u) if gate else (g, with_bad(u, bad))
        on, up, m = device.up(g) if act.gated else None, device.up(u), device.matrix(weight("Q8_0", 3, 96))
        ops = device.ops
        if product:
            return device.run(lambda: ops.matmul(ops.activate(act, on, up), m))
        return device.run(lambda: ops.plain(ops.activate(act, on, up)))

    return rows


def softcap(device: Device, bad: float | None) -> list[np.ndarray]:
    x = device.up(with_bad(draw(ROWS, 40), bad))
    return device.run(lambda: device.ops.softcap(x, 20.0))


def streams(device: Device, bad: float | None) -> list[np.ndarray]:
    m, scale, base = (device.up(x) for x in (with_bad(draw(ROWS, 24), bad, 11), draw(3), draw(24)))
    return device.run(lambda: device.ops.stream_weights(m, scale, base, 1e-3, 3))


def altup(operation: str, which: str, n: int = 40) -> Rows:
    """which: the argument with the bad number."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        sizes = {"x": 5 * n, "p": 5 * n, "a": 3 * n, "m": 4, "y": n, "first": n}
        if operation == "altup_enter":
            sizes["x"] = n
        of = {name: draw(ROWS, size, seed=i) for i, (name, size) in enumerate(sizes.items())}
        of[which] = with_bad(of[which], bad, 3)
        of |= {"predict": draw(16, 4), "correct": draw(4, 4), "scale": draw(n)}
        names = {
            "altup_enter": ("x", "a"),
            "altup_predict": ("x", "m", "predict"),
            "altup_active": ("p", "y", "m", "correct", "scale"),
            "altup_correct": ("p", "y", "m", "correct", "first"),
            "altup_leave": ("x", "a"),
        }[operation]
        given = [device.up(of[name]) for name in names]
        return device.run(lambda: getattr(device.ops, operation)(*given))

    return rows


def sparse_gates(device: Device, bad: float | None) -> list[np.ndarray]:
    x = device.up(with_bad(draw(ROWS, 300), bad))
    return device.run(lambda: device.ops.sparsify(x, 1.5))


# --- mixtures --------------------------------------------------------------------------------------------------


def mixture(router: bool, **law: Any) -> Rows:
    """The bad number in x; or, if ``router``, a row whose logits overflow: the router's column for it is huge, 0 in other
    rows, and x finite."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        experts = random_experts(lambda e, n, k: weight(e.name, n, k), "Q8_0 Q8_0 Q8_0", (5, 2, 32, 32), **law)
        x = draw(ROWS, 32)
        x[:, 3] = 0
        if router:
            data = experts.router.data.view(F).copy()
            data[1, 3] = F(3e38) if bad != -math.inf else F(-3e38)
            experts = replace(experts, router=replace(experts.router, data=data.view(np.uint8)))
            x[ROW, 3] = 0 if bad is None else 10
        else:
            x = with_bad(x, bad)
        if isinstance(device, OnGpu):
            experts = on_device(device.ops, experts)
        a, r, tokens = device.up(x), device.up(draw(ROWS, 32, seed=1)), device.up(np.arange(ROWS, dtype=np.int32))
        return device.run(lambda: device.ops.experts(experts, r, a, None, tokens))

    return rows


def biased_selection(device: Device, bad: float | None) -> list[np.ndarray]:
    """A bias of the selection that is not finite: all rows choose its expert, so there is no row without it."""
    experts = random_experts(
        lambda e, n, k: weight(e.name, n, k), "Q8_0 Q8_0 Q8_0", (5, 2, 32, 32), "selection", gating="sigmoid"
    )
    assert experts.selection_bias is not None
    rows: list[np.ndarray] = []
    for x in draw(ROWS, 1, 32):
        bias = experts.selection_bias.copy()
        if len(rows) == ROW and bad is not None:
            bias[1] = bad
        given: Any = replace(experts, selection_bias=bias)
        if isinstance(device, OnGpu):
            given = on_device(device.ops, given)
        a, r = device.up(x), device.up(draw(1, 32, seed=1))
        rows.append(device.run(lambda given=given, a=a, r=r: device.ops.experts(given, r, a))[0][0])  # type: ignore[misc]
    return [np.array(rows)]


LAWS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "softmax": {"gating": "softmax", "normalized": False},
    "sigmoid": {"gating": "sigmoid", "parts": "selection"},
    "unnormalized": {"gating": "sigmoid", "normalized": False},
    "sqrt_softplus": {"gating": "sqrt_softplus"},
}


# --- attention -------------------------------------------------------------------------------------------------


def attention(types: str, which: str, normed: bool = False, many: int = 0) -> Rows:
    """The bad number in q, k or v; ``many``: rows before the three, so that the pass is one of many rows."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        k_type, v_type = (cache_type(name) for name in types.split())
        d, n = 32, many + ROWS
        given = {name: draw(n, width, seed=k) for k, (name, width) in enumerate({"q": 2 * d, "k": d, "v": d}.items())}
        if bad is not None:
            given[which][many + ROW, 7] = bad
        norm = device.up(1 + draw(d) / 9) if normed else None
        heads: Heads[Any] = Heads(2, 1, d, d, True, d**-0.5, 1e-6, norm, norm, v_normed=normed)
        memory = device.memory(AttentionCacheSpec(1, d, d, 0), 64, Types(k_type, v_type))
        ops, batch = device.ops, rows_from(0, device, n)
        q, k, v = (device.up(x) for x in given.values())
        found = device.run(lambda: ops.plain(ops.attention(heads, q, k, v, memory, batch, None)))
        return [x[many:] for x in found]

    return rows


def latents(which: str, half: bool, indexed: bool = False) -> Rows:
    """indexed: whether a row attends to one position, which an indexer selects."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        n_head, n_nope, n_rope, rank = 2, 32, 16, 64
        widths = {"q": n_head * n_nope, "q_rope": n_head * n_rope, "c": rank, "k_rope": n_rope}
        widths |= {"key": 32, "index": 3 * 32, "weight": 3} if indexed else {}
        given = {name: draw(ROWS, width, seed=k) for k, (name, width) in enumerate(widths.items())}
        given[which] = with_bad(given[which], bad, 1)
        k_b, v_b = (replace(weight("Q8_0", n_head * r, k), stack=n_head) for r, k in ((rank, n_nope), (32, rank)))
        by_k, by_v = (device.ops.weight(m) for m in (k_b, v_b))
        norm, table = device.up(1 + draw(rank) / 9), device.up(draw(64, 2, n_rope // 2))
        latent: Latent[Any, Any] = Latent(n_head, n_nope, n_rope, rank, 32, 0.2, 1e-6, norm, by_k, by_v, table)
        kind = F16 if half else F32
        memory = device.memory(LatentCacheSpec(rank + n_rope, *((32, 1) if indexed else (0, 0))), 64, kind)
        x = [device.up(part) for part in given.values()]
        batch, ops = rows_from(0, device), device.ops

        def operation() -> Any:
            chosen = None
            if indexed:
                ops.keep_keys(x[4], memory.keys, batch)
                chosen = ops.choose_rows(x[5], x[6], 0.25, 1, 1, memory.keys, batch)
            return ops.latent_attention(latent, *x[:4], memory, batch, chosen)

        return device.run(operation)

    return rows


def delta_net(which: str) -> Rows:
    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        n_k, n_v, d, n_conv = 1, 2, 32, 3
        rng, channels = np.random.default_rng(0), (2 * n_k + n_v) * d
        up = device.up
        net: DeltaNet[Any] = DeltaNet(
            n_k, n_v, d, n_conv, 1e-6,
            conv1d=up(rng.uniform(0.5, 1, (channels, n_conv)).astype(F)), a=up(-np.ones(n_v, F)), dt=up(np.ones(n_v, F)),
            norm=up(np.ones(d, F)),
        )  # fmt: skip
        x, alpha, beta = draw(ROWS, channels), draw(ROWS, n_v), draw(ROWS, n_v, seed=1)
        at = {"query": 3, "key": n_k * d + 3, "value": 2 * n_k * d + 3}
        if which in at:
            x = with_bad(x, bad, at[which])
        alpha, beta = (with_bad(g, bad, 1) if which == name else g for name, g in (("alpha", alpha), ("beta", beta)))
        memory = device.memory(RecurrentCacheSpec(channels, n_conv, n_k, n_v, d, 1), 0, F32)
        a, gates, batch = up(x), [up(alpha), up(beta)], rows_from(0, device)
        batch = replace(batch, sequences=up(np.zeros(ROWS, np.int32)))
        return device.run(lambda: device.ops.delta_net(net, a, gates, memory, batch))

    return rows


def short_conv(part: int) -> Rows:
    """part: b, c or x."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        n, taps = 40, 3
        bcx = with_bad(draw(ROWS, 3 * n), bad, part * n + 3)
        memory = device.memory(ShortConvCacheSpec(n, taps, 1), 0, F32)
        a, weight, batch = device.up(bcx), device.up(1 + draw(n, taps) / 9), rows_from(0, device)
        batch = replace(batch, sequences=device.up(np.zeros(ROWS, np.int32)))
        return device.run(lambda: device.ops.short_conv(weight, a, memory, batch))

    return rows


def kda(which: int) -> Rows:
    """which: of q, k, v, f, b."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        n_head, d, taps = 4, 32, 3
        inner = n_head * d
        given = [draw(ROWS, n) for n in (inner, inner, inner, inner, n_head)]
        given[which] = with_bad(given[which], bad, 3)
        weights = 1 + draw(3 * inner, taps) / 9, -1 - draw(n_head) / 9, draw(inner)
        net = KDA(n_head, d, taps, 1e-6, *(device.up(weight) for weight in weights))
        memory = device.memory(KDAConfig(n_head, d, taps).cache_spec(1, 16), 0, F32)
        batch = replace(rows_from(0, device), sequences=device.up(np.zeros(ROWS, np.int32)))
        q, k, v, f, b = (device.up(array) for array in given)
        return device.run(lambda: device.ops.kda(net, q, k, v, f, b, memory, batch))

    return rows


def mamba(which: str) -> Rows:
    """which: x, gate or step."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        n_head, d, n, taps = 2, 16, 32, 3
        channels, inner = n_head * d + 2 * n, n_head * d
        u, z = draw(ROWS, channels + n_head), draw(ROWS, inner)
        u = with_bad(u, bad, {"x": 3, "step": channels}[which]) if which != "gate" else u
        z = with_bad(z, bad, 3) if which == "gate" else z
        weights = 1 + draw(channels, taps) / 9, draw(channels), draw(n_head), -1 - draw(n_head) / 9, draw(n_head)
        net = Mamba(n_head, d, n, 1, taps, *(device.up(weight) for weight in weights))
        memory = device.memory(MambaCacheSpec(channels, taps, n_head, d, n, channels + 2 * n_head, 1), 0, F32)
        batch = replace(rows_from(0, device), sequences=device.up(np.zeros(ROWS, np.int32)))
        given = device.up(u), device.up(z)
        return device.run(lambda: device.ops.mamba(net, *given, memory, batch))

    return rows


# --- compressed rows -------------------------------------------------------------------------------------------


def rounding(four: bool) -> Rows:
    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        x = device.up(with_bad(draw(ROWS, 128), bad))
        ops = device.ops
        return device.run(lambda: ops.round_queries(x, 2) if four else ops.round_latents(x, 16))

    return rows


def compressed(which: str, half: bool = False) -> Rows:
    """A pass of four rows of which the last completes a block and sees it, after 31 rows; the first rows of the result are
    those before it."""

    def rows(device: Device, bad: float | None) -> list[np.ndarray]:
        # All rows are chosen, or a row of a bad number may not be among them.
        d, n_keys, ratio, top_k, n_head = 32, 32, 4, 16 if which in ("value", "score") else 5, 2
        kind = F16 if half else F32
        memory = device.memory(CompressedCacheSpec(d, 9, ratio, 2, n_keys, top_k, 5), 64, kind)
        widths = {"latent": d, "query": n_head * d, "value": 2 * d, "score": 2 * d, "index": n_head * n_keys}
        widths |= {"weight": n_head, "key": 2 * n_keys, "key score": 2 * n_keys}
        up, ops = device.up, device.ops
        laws = [
            Compressor(ratio, 2, up(draw(ratio, 2 * width, seed=3)), up(1 + draw(width, seed=4) / 9), 1e-6)
            for width in (d, n_keys)
        ]
        table, sinks = up(draw(64, 2, 4)), up(draw(n_head))
        results: list[np.ndarray] = []
        for first, count in ((0, 29), (29, ROWS)):
            x = {name: draw(count, width, seed=first + k) for k, (name, width) in enumerate(widths.items())}
            if first and bad is not None:
                # Of a block's own tokens, the second halves count.
                x[which][ROW, {"weight": 1, "latent": 3, "query": 3, "index": 3}.get(which, d + 3)] = bad
            x = {name: up(array) for name, array in x.items()}
            positions, zeros = np.arange(first, first + count, dtype=np.int32), np.zeros(count, np.int32)
            batch = Batch(up(zeros), up(positions), up(zeros))

            def operation(x: Any = x, batch: Any = batch) -> Any:
                ops.keep_latents(x["latent"], memory, batch)
                ops.compress(laws[0], x["value"], x["score"], memory.compressed, batch, table)
                ops.compress(laws[1], x["key"], x["key score"], memory.keys, batch, table, True)
                if batch.tokens.shape[0] != ROWS:
                    return []  # only what the last rows see, because attention takes seconds in the simulator
                chosen = ops.choose_rows(x["index"], x["weight"], 0.25, ratio, top_k, memory.keys, batch)
                return ops.attend_compressed(x["query"], memory, batch, 0.2, sinks, ratio, chosen)

            results = device.run(operation)
        return results

    return rows


NORMS = [
    Case("rms_norm", rms_norm, SQUARES),
    Case("rms_norm and a product", norm_of_a_product, SQUARES),
    Case("layer_norm", layer_norm, SQUARES),
    Case("layer_norm and a product", layer_norm_of_a_product, SQUARES),
    Case("rms_norm_add", added_norm, SQUARES),
    Case("rms_norm_add, rms_norm and a product", added_norm_of_a_product, SQUARES),
    Case("per_layer_inputs", per_layer, SQUARES),
    Case("gated_norm", gated_norm, SQUARES),
    Case("sparsify", sparse_gates, SQUARES),
    *(
        Case(f"{name}, {which}", altup(name, which), SQUARES)
        for name in ("altup_enter", "altup_leave")
        for which in "xa"
    ),
    Case("rotate_tail", norm_of_a_tail, SQUARES),
    Case("mtp_input", mtp_input, SQUARES),
    *(Case(f"attention, norm of {which}", attention("f16 f16", which, True), SQUARES) for which in ("q", "k", "v")),
    Case("latent attention, norm of c", latents("c", False), SQUARES),
    *(Case(f"delta net, {which}", delta_net(which), (*NOT_FINITE, 1e20)) for which in ("query", "key")),
]

OTHERS = [
    *(Case(f"matmul {name}", product_with(name, n)) for name, n in (("Q8_0", 64), ("F16", 40), ("F32", 40))),
    *(
        Case(f"{act.kind}, {'gate' if gate else 'up'}{', product' * product}", activation(act, gate, product))
        for act in EVERY_ACTIVATION
        for gate in (True, False)
        for product in (False, True)
        if (not gate or KINDS[act.kind][0]) and (not product or act != SWIGLU or gate)
    ),
    Case("softcap", softcap),
    Case("stream_weights", streams),
    *(Case(f"altup_predict, {which}", altup("altup_predict", which)) for which in "xm"),
    *(Case(f"altup_active, {which}", altup("altup_active", which)) for which in "pym"),
    *(Case(f"altup_correct, {which}", altup("altup_correct", which)) for which in ("p", "y", "m", "first")),
    *(
        Case(f"experts {name}, {'router' if r else 'x'}", mixture(r, **law))
        for name, law in LAWS.items()
        for r in (False, True)
    ),
    Case("experts, selection bias", biased_selection, (math.inf, math.nan)),
    *(
        Case(f"attention {types}, {which}", attention(types, which))
        for types in ("f32 f32", "f16 f16", "q8_0 q8_0", "q4_0 q4_0", "i8 i8", "i12 i12")
        for which in "qkv"
    ),
    *(
        Case(f"attention of many rows {types}, {which}", attention(types, which, many=17))
        for types in ("f32 f32", "f16 f16", "q8_0 q8_0", "i8 i8", "i12 i12")
        for which in "qkv"
    ),
    *(Case(f"latent attention {which}", latents(which, True)) for which in ("q", "q_rope", "c", "k_rope")),
    *(Case(f"indexer of positions, {which}", latents(which, True, True)) for which in ("key", "index", "weight")),
    *(Case(f"delta net, {which}", delta_net(which)) for which in ("value", "alpha", "beta")),
    *(Case(f"kda, {which}", kda(part)) for part, which in enumerate("qkvfb")),
    *(Case(f"mamba, {which}", mamba(which)) for which in ("x", "gate", "step")),
    *(Case(f"short convolution, {which}", short_conv(part)) for part, which in enumerate("bcx")),
    *(Case(f"rounding to {4 if four else 8} bits", rounding(four)) for four in (False, True)),
    *(
        Case(f"compressed rows, {which}", compressed(which, k % 2 == 1))
        for k, which in enumerate(("latent", "query", "value", "score", "index", "weight", "key", "key score"))
    ),
]

TOO_LARGE = [
    Case(f"attention {types}, {which}", attention(types, which), (bad, -bad))
    for types, bad in (("f16 f16", 7e4), ("q8_0 q8_0", 1e8), ("q4_0 q4_0", 1e8), ("i8 i8", 1e9), ("i12 i12", 1e10))
    for which in "kv"
]
"""Keys and values that a cache type cannot represent."""
