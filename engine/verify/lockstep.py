"""A model on the CPU and on a GPU in lockstep: every operation runs on both, and the results of each kernel are compared.

The architecture's own code computes a pass on pairs of arrays, weights and caches.  Every operation is called on both
backends.  The GPU's kernels are started one at a time, and each is waited for, so that an error or a difference can be
attributed to a kernel.  Since all earlier results are equal, the inputs of an operation are equal too.  So the first kernel
that differs is at fault, unless it is correct with the CPU's inputs in fresh memory (:class:`Difference`).
"""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias, cast

import numpy as np

from engine.arrays import Batch
from engine.cache.contents import stored
from engine.cache.kv import AttentionCache, KVCache
from engine.cache.recurrent import SEGMENT
from engine.cache.spec import LayerMemory, StoredRows, of_sequence
from engine.cache.types import CHUNK
from engine.cpu.products.repack import Records
from engine.cuda.products.quantize import NARROW, RUN, layout_of
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.tensor import Tensor
from engine.cuda.runtime.values import Attended, Deferred
from engine.errors import DeviceError
from engine.models.dflash import DFlash
from engine.models.drafter import pass_of
from engine.models.mtp import MTP, DraftingLayer
from engine.models.placement import Placement
from engine.models.rotary import Rotary
from engine.ops.observation import Observation
from engine.ops.operations import Ops
from engine.ops.spans import CUT_BITS, SPANS
from engine.ops.weight import Weight
from engine.verify import latents
from engine.verify.check import Check, Difference, Site, bits_of
from engine.verify.layout import (
    activations,
    chunk_parts,
    delta_gates,
    delta_records,
    integer_chunk_parts,
    kept_rows,
    page_of,
    same_weights,
)

f32 = np.float32

CHUNK_PARTS = ("largest score and sum", "weighted values")
"""The results of attention for each chunk, before the chunks are joined."""


Seen: TypeAlias = Observation[Any]
"""The arrays that a GPU kernel has written."""

Given: TypeAlias = Any
"""An argument or a result of an operation: pairs, plain values, and containers of these."""

Inner: TypeAlias = dict[str, np.ndarray]
"""Intermediate values of an operation on the CPU, by name."""


@dataclass(frozen=True)
class Pair:
    """One value on both devices.

    name: the name of a weight within its layer.
    computed: whether it is the result of an operation.
    parts: the inputs of a result whose computation the GPU defers, by their names there.
    """

    cpu: Given
    gpu: Given
    name: str = ""
    computed: bool = False
    parts: tuple[tuple[str, "Pair"], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.cpu.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.cpu.shape)

    def __getitem__(self, rows: slice) -> "Pair":
        return replace(self, cpu=self.cpu[rows], gpu=self.gpu[rows])

    def reshape(self, *shape: int) -> "Pair":
        """A pair of arrays of this shape with the same elements."""
        return replace(self, cpu=self.cpu.reshape(shape), gpu=self.gpu.reshape(*shape))


def _as_list(returned: Given) -> list[Given]:
    """The results of an operation: none, one, or several."""
    return returned if isinstance(returned, list) else [] if returned is None else [returned]


# --- pairs -----------------------------------------------------------------------------------------------------


def join(cpu: Given, gpu: Given, name: str = "") -> Given:
    """Join attributes of the same name of two models: arrays and weights become pairs, containers of them are copied.  A
    matrix is named after its tensor, an array after the attribute that holds it."""
    if isinstance(cpu, (Records, Weight)):
        return Pair(cpu, gpu, re.sub(r"^blk\.\d+\.|\.weight$", "", cpu.name))
    if isinstance(cpu, np.ndarray):
        return Pair(cpu, gpu, name)
    if isinstance(cpu, (list, tuple)):
        joined = [join(a, b, name) for a, b in zip(cpu, gpu, strict=True)]
        return type(cpu)(*joined) if hasattr(cpu, "_fields") else type(cpu)(joined)
    if is_dataclass(cpu) or isinstance(cpu, (KVCache, Rotary, MTP, DraftingLayer, DFlash)):
        both = copy.copy(cpu)
        for field, value in vars(cpu).items():
            object.__setattr__(both, field, join(value, vars(gpu)[field], field))
        return both
    return cpu


def take(value: Given, of: Callable[[Pair], Given]) -> Given:
    """``value`` with each pair in it replaced by ``of(pair)``: the reverse of ``join``."""
    if isinstance(value, Pair):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(take(v, of) for v in value)
    if is_dataclass(value):
        one = copy.copy(value)
        for field, inside in vars(value).items():
            object.__setattr__(one, field, take(inside, of))
        return one
    return value


def sides(value: Given) -> tuple[Given, Given]:
    """``value`` on the CPU and on the GPU."""
    return take(value, lambda pair: pair.cpu), take(value, lambda pair: pair.gpu)


def uploaded(gpu: Given, value: Given) -> Given:
    """A copy of dataclasses of NumPy arrays whose arrays are in device memory."""
    if isinstance(value, np.ndarray):
        return gpu.upload(np.ascontiguousarray(value))
    if is_dataclass(value):
        one = copy.copy(value)
        for field, inside in vars(value).items():
            object.__setattr__(one, field, uploaded(gpu, inside))
        return one
    return value


def _cpu_side(pair: Pair) -> Given:
    # Some CPU operations work in place, and a pair must keep its value.
    return pair.cpu.copy() if pair.computed else pair.cpu


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention operation: the cache, the last position that each row sees (``last``), and the window as
    kernels of the CPU take it; ``stores``: whether it appends keys and values at these positions."""

    heads: Given
    q: Given
    cache: Given
    last: Given
    window: int
    stores: bool

    @classmethod
    def of(cls, name: str, args: Sequence[Given]) -> "AttentionCall | None":
        """The arguments of ``attention`` or ``attend_past``; None for other operations."""
        if name == "attention":
            heads, q, _, _, cache, batch, _ = args
            return cls(heads, q, cache, batch.positions, cache.window, True)
        if name == "attend_past":
            heads, q, cache, _, last, _, window, *spans = args
            return cls(heads, q, cache, last, window + SPANS if any(spans) else window, False)
        return None

    @property
    def end(self) -> int:
        """The end of the positions that any row sees."""
        last = int(self.last.cpu.max())
        return (last >> CUT_BITS if self.window > SPANS else last) + 1


def _paged(cpu: Given, gpu: Given, name: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[Tensor, Tensor]]:
    """Pages of pairs, an attribute of ``cpu``, and of the GPU, with the tables of both."""
    return (getattr(cpu, name).cpu, cpu.table.cpu), (getattr(gpu, name), gpu.table)


# --- operations on both ----------------------------------------------------------------------------------------


class Lockstep:
    """A backend of pairs, and the passes of a model on it.

    cpu, gpu: the same model (``engine.models.base.Model``) on each device; note: called with every comparison.
    """

    def __init__(self, cpu: Given, gpu: Given, note: Callable[[Site, Check], None]) -> None:
        self._cpu, self._gpu = cpu, gpu
        self._note = note
        self._layer: int | None = None
        self._model = copy.copy(cpu)
        for field, value in vars(cpu).items():
            if field not in ("config", "gguf", "ops", "drafter", "placement", "_loaders", "further"):
                setattr(self._model, field, join(value, vars(gpu)[field], field))
        self._model.ops = self
        self._model.placement = Placement.whole(cpu.config, cast(Ops, self))
        self._model.block = self._block
        if cpu.drafter is not None:
            self._model.drafter = join(cpu.drafter, gpu.drafter)
            self._model.drafter.belong(self._model)

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int) -> np.ndarray:
        """Run a pass on both devices and return the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab].
        Raises Difference unless all results are equal."""
        for model in (self._cpu, self._gpu):
            model.prepare(int(positions[0]), tokens.size, model.sequence)
        logits = self._model.compute(self._pass(tokens, positions), n_logits)
        for model in (self._cpu, self._gpu):
            model.sequence.commit(tokens.tolist())
        return np.empty((0, self._cpu.config.n_vocab), f32) if logits is None else logits.cpu

    def draft(self, token: int, position: int, number: int, count: int = 1) -> None:
        """Run the pass of draft ``number`` of a step with ``count`` drafts, after the tokens in the cache; for the first one
        also the pass of their block, if there is one.  Raises Difference unless all results are equal."""
        for model in (self._cpu, self._gpu):
            model.reserve(position + 1)
        drafter = self._model.drafter
        if drafter.block is not None and number == 0:
            for model in (self._cpu, self._gpu):
                positions = model.drafter.prepare(position, count, model.sequence)
            tokens = np.full(positions.size, drafter.block.mask, np.int32)
            tokens[0] = token
            drafter.fill(self._pass(tokens, positions), 0)
        at_token, at_position = (np.array([value], np.int32) for value in (token, position))
        pass_of(drafter.passes, number)(self._pass(at_token, at_position), 1)

    def _pass(self, tokens: np.ndarray, positions: np.ndarray) -> Given:
        """The rows of a pass on both devices."""
        rows = tokens, positions, np.full(tokens.size, self._cpu.sequence.slot, np.int32)
        tokens_of_both, positions_of_both, slots = (Pair(x, self._gpu.ops.upload(x)) for x in rows)
        return Batch[Given](tokens_of_both, positions_of_both, slots)

    def _block(self, il: int, x: Given, batch: Given) -> Given:
        self._layer = il
        try:
            return type(self._model).block(self._model, il, x, batch)
        finally:
            self._layer = None

    def __getattr__(self, name: str) -> Given:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._operate, name)

    def _operate(self, name: str, *args: Given) -> Given:
        """Run an operation on both devices.  Returns a pair, or a list of pairs."""
        cpu, inner = self._cpu.ops, dict[str, np.ndarray]()
        before = self._before(args)
        cpu.observe(lambda seen: inner.update(seen.values))
        try:
            returned = getattr(cpu, name)(*take(args, _cpu_side))
        finally:
            cpu.observe(None)
        expected = _as_list(returned)
        given = take(args, lambda pair: pair.gpu)
        plan = self._record(name, given)
        results, _ = plan.result
        tensors = ", ".join(a.name for a in args if isinstance(a, Pair) and a.name and not AttentionCall.of(name, args))
        compared: list[Check] = []

        def compare(seen: Seen, checks: list[Check]) -> None:
            compared.extend(checks)
            site = Site(self._layer, name, tensors, seen.kernel, seen.variant)
            for check in checks:
                self._note(site, check)
                if check.differing.any():
                    raise Difference(site, check, self._judge(name, args, expected, inner, check, before))

        self._run(name, args, given, plan, expected, inner, compare)
        if returned is None:
            return None
        pairs = [
            Pair(c, g, computed=True, parts=self._parts(name, args, g, compared))
            for c, g in zip(expected, results, strict=True)
        ]
        return pairs if isinstance(returned, list) else pairs[0]

    def _parts(
        self, name: str, args: Sequence[Given], result: Given, compared: Sequence[Check]
    ) -> tuple[tuple[str, Pair], ...]:
        """The inputs of a result whose computation the GPU defers."""
        if not isinstance(result, Deferred):
            return ()
        given = AttentionCall.of(name, args)
        if not isinstance(result, Attended) or given is None:
            inputs = (a for a in args if isinstance(a, Pair))
            return tuple(zip(result.inputs, inputs, strict=True))
        # CPU operations have no such arrays, but the chunks were compared with the GPU's.
        mass, sums = (check.cpu for check in compared if check.what in CHUNK_PARTS)
        padded = np.zeros((*sums.shape[:3], result.values.size // (mass.size // 2)), f32)
        padded[..., : sums.shape[3]] = sums
        parts = (
            ("mass", Pair(mass, result.mass)),
            ("values", Pair(padded, result.values)),
            ("positions", given.last),
        )
        return (*parts, ("gate", given.q)) if given.heads.gated else parts

    def _record(self, name: str, given: Sequence[Given]) -> Given:
        """The launches of an operation; ``result`` is (its results, its results with nothing deferred)."""
        gpu = self._gpu.ops

        def forward() -> Given:
            results = _as_list(getattr(gpu, name)(*given))
            return results, [gpu.plain(result) for result in results]

        return gpu.record(forward)

    def _run(
        self,
        name: str,
        args: Sequence[Given],
        given: Sequence[Given],
        plan: Given,
        expected: list[np.ndarray],
        inner: Inner,
        compare: Callable[[Seen, list[Check]], None],
    ) -> None:
        """Start the launches one by one; after each, call ``compare`` with the arrays that it wrote and the checks of these
        against the CPU's.

        inner: intermediate values of the CPU: rotated queries, or the convolved inputs of a delta net.
        """
        gpu = self._gpu.ops
        pairs = list(zip(plan.result[1], expected, strict=True))
        # A result may be written in parts, and its memory may have held something else before.
        places = [range(tensor.address, tensor.address + array.nbytes) for tensor, array in pairs]
        written = [(i, out.address) for i, launch in enumerate(plan.launches) for out in launch.outputs]
        last = [max((i for i, address in written if address in place), default=-1) for place in places]
        ended = count()

        def after(seen: Seen) -> None:
            i = next(ended)
            done = [pair for pair, end in zip(pairs, last, strict=True) if end == i]
            between = {what: out for what, out in seen.values.items() if all(out.address != t.address for t, _ in done)}
            checks = self._between(name, args, given, seen.kernel, between, inner)
            checks += [Check("result", array, gpu.download(tensor).reshape(array.shape)) for tensor, array in done]
            compare(seen, checks)

        gpu.observe(after)
        try:
            gpu.start(plan)
        except DeviceError as error:
            where = "" if self._layer is None else f" of layer {self._layer}"
            raise DeviceError(f"in {name}{where}: {error}") from error
        finally:
            gpu.observe(None)

    def _between(
        self,
        name: str,
        args: Sequence[Given],
        given: Sequence[Given],
        kernel: str,
        values: dict[str, Tensor],
        inner: Inner,
    ) -> list[Check]:
        """Checks of what a kernel wrote besides results of its operation: ``values``, caches and rings."""
        attended = AttentionCall.of(name, args)
        if name in ("latent_attention", "remember_latent"):
            return self._latent(name, args, given, kernel, values, inner)
        if name in ("keep_latents", "keep_keys", "compress"):
            return self._compressed(name, kernel, args, given)
        if name == "remember":
            return self._appended(args[3], args[4].positions.cpu, given[3], values)
        if name in ("mamba", "kda"):
            found = {what: self._gpu.ops.download(value) for what, value in values.items() if what == "convolved"}
            convolved = [Check(what, inner[what], y.reshape(inner[what].shape)) for what, y in found.items()]
            return [*convolved, *self._kept(name, kernel, args)]
        if "convolved" in values:
            return self._convolved(args, values, inner["convolved"])
        if name in ("delta_net", "keep_rows", "short_conv"):
            coupled = self._coupled(args, values, inner["convolved"]) if "records" in values else []
            return [*coupled, *self._kept(name, kernel, args)]
        if attended and "query" in values:
            return self._rotated(attended, given, values, inner["query"])
        if attended and "mass" in values:
            return self._chunks(attended, values, inner["query"])
        if name.startswith("matmul"):
            x = args[1 if name == "matmul_add" else 0].cpu
            if "q" in values:
                return self._quantized(
                    x, [self._gpu.ops.download(values[what]) for what in ("q", "scales", "sums") if what in values]
                )
            if "result" in values:
                what, expected = f"{kernel} of x", x
                if kernel.startswith("matmul") or kernel == "add":
                    # A product that does not add the bias itself, or the sum with the bias.
                    what, expected = "x times the matrix", self._cpu.ops.matmul(x, args[2].cpu)[0]
                    if kernel == "add":
                        what, expected = f"{what}, with the bias", self._cpu.ops.add(expected, args[3].cpu)
                return [Check(what, expected, self._gpu.ops.download(values["result"]))]
        return []

    def _quantized(self, x: np.ndarray, words: Sequence[np.ndarray]) -> list[Check]:
        rows, columns = x.shape
        # One scale for each unit of each row, rows in tiles of 8.
        unit = columns * 8 * -(-rows // 8) // words[1].size if len(words) > 1 else RUN
        names = ("x as int8", "its scales", "its sums")
        q, d, s = self._cpu.ops._quantize(x, unit)
        if layout_of(unit, rows) != NARROW:
            s = s.astype(np.float16)
        elif unit == 256:
            wide = s.reshape(rows, -1, 8, 2).sum(3)
            s = np.concatenate([s.reshape(rows, -1, 16), wide], 2).reshape(rows, -1).astype(np.int16)
        elif unit == 32:
            s = s.reshape(rows, -1, 2).sum(2, dtype=np.int32)
        else:
            s = np.empty((rows, 0), np.int32)
        pairs = zip(names, (q, d, s), activations(unit, rows, columns, *words), strict=True)
        return [Check(what, a, b) for what, a, b in pairs]

    def _rotated(
        self, attended: AttentionCall, given: Sequence[Given], values: dict[str, Tensor], queries: np.ndarray
    ) -> list[Check]:
        """Checks of what the rotation kernel passes to attention: the queries, and the new contents of the cache."""
        cache = attended.cache
        law = [("rotated query", queries)]
        if cache.k_type.whole:
            integers, scales = self._cpu.ops.integer_queries(queries, attended.heads.scale, cache.k_type)
            bytes_of = np.stack([integers >> 3, integers & 7], axis=2).astype(np.int8)
            law = [("rotated query as integers", bytes_of), ("its scales", scales)]
        elif cache.k_type.quantized:
            both = self._cpu.ops.int8_queries(queries, attended.heads.scale, cache.k_type)
            law = list(zip(("rotated query as int8", "its scales"), both, strict=True))
        found = [self._gpu.ops.download(values[name]) for name in ("query", "query_scales")[: len(law)]]
        checks = [
            Check(what, mine, np.ascontiguousarray(theirs).view(mine.dtype).reshape(mine.shape))
            for (what, mine), theirs in zip(law, found, strict=True)
        ]
        if attended.stores:
            checks += self._appended(cache, attended.last.cpu, given[4], values)
        return checks

    def _chunks(self, attended: AttentionCall, values: dict[str, Tensor], queries: np.ndarray) -> list[Check]:
        """Checks of the attention kernel's results for each chunk."""
        gpu, heads, cache, positions = self._gpu.ops, attended.heads, attended.cache, attended.last.cpu
        rows, d_v = positions.size, cache.d_v
        if rows > NARROW_ROWS:
            return []  # the rows belong to several launches, each with its own results
        partials = values["mass"].size // (2 * rows * heads.n_head)
        padded = -(-d_v // 32) * 32
        mass = np.zeros((rows, heads.n_head, partials, 2), f32)
        sums = np.zeros((rows, heads.n_head, partials, d_v), f32)
        seen = np.zeros((rows, 1, partials, 1), np.bool_)
        both = (memory.cpu for memory in (cache.keys, cache.values))
        words = (memory.reshape(*memory.shape[:2], -1).view(np.uint32) for memory in both)
        law = *words, positions, cache.table.cpu[0]
        if cache.k_type.whole:
            query = self._cpu.ops.integer_queries(queries, heads.scale, cache.k_type)
            results = mass, sums, seen[:, 0, :, 0]
            integer_chunk_parts(cache.k_type.bits, heads.softcap)(*query, *law, attended.window, *results)
        else:
            query = self._cpu.ops.int8_queries(queries, heads.scale, cache.k_type)
            mirror = (*law, f32(heads.scale), attended.window)
            parts_of = chunk_parts(cache.k_type.bits, cache.v_type.bits, heads.softcap)
            parts_of(queries, *query, *mirror, mass, sums, seen[:, 0, :, 0])
        found = gpu.download(values["mass"]).reshape(mass.shape)
        # The sign of a largest score of 0 depends on the order of comparisons; no result depends on it.
        parts = gpu.download(values["values"]).reshape(rows, heads.n_head, partials, padded)[..., :d_v]
        return [
            Check(CHUNK_PARTS[0], mass + f32(0.0), found + f32(0.0), seen),
            Check(CHUNK_PARTS[1], sums, parts, seen),
        ]

    def _appended(
        self, cache: Given, positions: np.ndarray, device_cache: AttentionCache[Tensor], values: dict[str, Tensor]
    ) -> list[Check]:
        """Checks of what a rotation kernel stored in the cache and passes to attention."""
        gpu, chunks, lanes = self._gpu.ops, positions // CHUNK, positions % CHUNK
        pages = gpu.download(device_cache.table[:1])[0]
        appended, checks = [], []
        for what, tensor, mine, kind, d, by_position in (
            ("stored key", device_cache.keys, cache.keys.cpu, cache.k_type, device_cache.d_k, False),
            ("stored value", device_cache.values, cache.values.cpu, cache.v_type, device_cache.d_v, True),
        ):
            theirs = np.empty((mine.shape[0], positions.size, *mine.shape[2:]), mine.dtype)
            for chunk in np.unique(chunks):
                theirs[:, chunks == chunk] = page_of(gpu, tensor, int(pages[chunk]))[:, None]
            both = ((mine, cache.table.cpu[0, chunks]), (theirs, np.arange(positions.size)))
            picked = [stored(memory, kind, d, by_position, place, lanes) for memory, place in both]
            appended.append(bits_of(picked[0]).astype(np.uint32))
            if kind.bits == 16:
                picked = [np.ascontiguousarray(a).view(np.float16) for a in picked]
            checks.append(Check(what, *picked))
        words = np.concatenate(appended, axis=2)
        if "words" in values:
            checks.append(Check("both as words", words, gpu.download(values["words"])))
        return checks

    def _latent(
        self,
        name: str,
        args: Sequence[Given],
        given: Sequence[Given],
        kernel: str,
        values: dict[str, Tensor],
        inner: Inner,
    ) -> list[Check]:
        """Checks of what the kernels of latent attention pass on: the queries times k_b, unless factors multiply them later;
        both parts of the queries, and the rows in the cache; the results of chunks."""
        at = 5 if name == "latent_attention" else 3
        gpu, latent, cache, positions = self._gpu.ops, args[0], args[at], args[at + 1].positions.cpu
        if kernel == "latent_rope":
            checks = [Check(*latents.stored(gpu, *_paged(cache, given[at], "rows"), positions))]
            if "query" in values:
                query = np.concatenate([inner["query"], inner["rotated query"]], axis=2)
                checks.append(Check("rotated query", query, gpu.download(values["query"]).reshape(query.shape)))
            return checks
        chosen = sides(args[7])[0] if name == "latent_attention" else None
        if kernel == "ends" and chosen is not None:
            ends = np.minimum(positions, np.int32(chosen.shape[1] - 1))
            return [Check("last of the chosen", ends, gpu.download(values["result"]))]
        if "mass" in values:
            queries = inner["query"], inner["rotated query"]
            compared = latents.of_chunks(gpu, *queries, cache, positions, chosen, latent.scale, values)
            return [Check(*one) for one in compared]
        query = inner["query"] if "result" in values and latent.query_scales is None else np.empty(0, f32)
        if query.size and values["result"].size == query.size and kernel.startswith("matmul"):
            return [Check("query times k_b", query, gpu.download(values["result"]).reshape(query.shape))]
        return []

    def _compressed(self, name: str, kernel: str, args: Sequence[Given], given: Sequence[Given]) -> list[Check]:
        """Checks of the latents or keys of a pass, of the compressed rows that it completes, and of what later rows are made
        of."""
        gpu = self._gpu.ops
        if name == "keep_keys":
            _, keys, batch = args
            paged = _paged(keys, given[1], "rows")
            return [Check(*one) for one in latents.compressed(gpu, *paged, 1, batch.positions.cpu, True)]
        if name == "keep_latents":
            _, memory, batch = args
            return [Check(*latents.stored(gpu, *_paged(memory, given[1], "latents"), batch.positions.cpu))]
        law, _, _, blocks, batch, _, *transposed = args
        positions = batch.positions.cpu
        if kernel == "compress":
            paged = _paged(blocks, given[3], "rows")
            return [Check(*one) for one in latents.compressed(gpu, *paged, law.ratio, positions, any(transposed))]
        mine, theirs = (of_sequence(pending, 0) for pending in sides(blocks.pending))
        return [Check("open block", *kept_rows(gpu, mine, theirs, int(positions[0]), positions.size))]

    def _convolved(self, args: Sequence[Given], values: dict[str, Tensor], y: np.ndarray) -> list[Check]:
        """Checks of what a delta net computes for all tokens before its state is updated token by token."""
        net, _, gates, _, batch = args
        y_found, gates_found = (self._gpu.ops.download(values[name]) for name in ("convolved", "gates"))
        alpha, beta = (pair.cpu for pair in gates) if len(gates) == 2 else np.split(gates[0].cpu, 2, axis=1)
        opened = delta_gates(alpha, beta, net.a.cpu, net.dt.cpu)
        # Tokens are counted from the beginning of the first segment.
        at = int(batch.positions.cpu[0]) % SEGMENT
        return [
            Check("convolved and normalized", y, y_found[at : at + batch.rows]),
            Check("decay and rate", opened, gates_found[:, at : at + batch.rows]),
        ]

    def _coupled(self, args: Sequence[Given], values: dict[str, Tensor], y: np.ndarray) -> list[Check]:
        """A check of how the tokens of a segment act on each other, for the segments that begin in the pass."""
        net, _, gates, _, batch = args
        alpha, beta = (pair.cpu for pair in gates) if len(gates) == 2 else np.split(gates[0].cpu, 2, axis=1)
        at = int(batch.positions.cpu[0]) % SEGMENT
        first, skipped = -(-at // SEGMENT), -at % SEGMENT
        opened = delta_gates(alpha[skipped:], beta[skipped:], net.a.cpu, net.dt.cpu)
        expected = delta_records(y[skipped:], opened, net.n_k, net.grouped)
        found = self._gpu.ops.download(values["records"])[:, first : first + expected.shape[1]].copy()
        # Weights of a token for those before it are not used: token i, lane l with the tokens l and l + 8.
        n, lanes = 2 * SEGMENT * SEGMENT, np.arange(SEGMENT).reshape(2, SEGMENT // 2).T
        before = lanes[:, None, :] < np.arange(SEGMENT)[:, None, None, None]
        weights = found[..., :n].reshape(*found.shape[:2], SEGMENT, SEGMENT // 2, 2, 2)
        found[..., :n] = np.where(before, np.float32(0), weights).reshape(*found.shape[:2], n)
        return [Check("weights of the tokens of a segment", expected, found)]

    def _kept(self, name: str, kind: str, args: Sequence[Given]) -> list[Check]:
        """Checks of what a kernel of an operation stored in rings by position."""
        positions = args[-1].positions.cpu
        first, end = int(positions[0]), int(positions[0]) + positions.size
        written: list[tuple[StoredRows[Any], StoredRows[Any]]]
        if name == "keep_rows":
            both = [StoredRows[Any]("row", of_sequence(ring, 0), first, end) for ring in sides(args[0])]
            written = [(both[0], both[1])]
        else:
            mine, theirs = sides(args[-2])
            written = list(zip(mine.written(0, first, end), theirs.written(0, first, end), strict=True))
            if name == "delta_net":
                inputs, state, keys, deltas, decays = written
                parts = {"couple": [keys, decays], "delta_rule": [state, deltas], "keep_rows": [inputs]}
                written = parts.get(kind, written)
            elif name in ("mamba", "kda"):
                inputs, state, tokens = written
                parts = {"conv": [inputs, tokens] if theirs.has_room(end - first) else [], "scan": [state]}
                written = parts.get(kind.removeprefix(f"{name}_"), [inputs, tokens])
            elif kind == "short_conv" and not theirs.has_room(end - first):
                written = []  # another kernel stores them
        return [
            Check(
                f"kept {of_cpu.name}",
                *kept_rows(self._gpu.ops, of_cpu.ring, of_gpu.ring, of_cpu.first, of_cpu.end - of_cpu.first),
            )
            for of_cpu, of_gpu in written
        ]

    # --- a second look -----------------------------------------------------------------------------------------

    def _before(self, args: Sequence[Given]) -> LayerMemory[Any] | None:
        """A copy of the memory among the arguments, if the operation may overwrite what it reads."""
        batches = [arg for arg in args if isinstance(arg, Batch)]
        memories = [arg for arg in args if isinstance(arg, LayerMemory)]
        if not batches or not memories:
            return None
        mine, theirs = sides(memories[0])
        kept: LayerMemory[Any] | None = mine.before_pass(theirs, int(batches[0].positions.cpu[0]))
        return kept

    def _judge(
        self,
        name: str,
        args: Sequence[Given],
        expected: list[np.ndarray],
        inner: Inner,
        first: Check,
        before: LayerMemory[Any] | None,
    ) -> str:
        """A sentence on whether the kernel itself is at fault, found by running the operation again with the CPU's inputs in
        fresh memory."""
        gpu = self._gpu.ops
        for pair in args:
            if isinstance(pair, Pair) and isinstance(pair.cpu, (Records, Weight)) and not same_weights(gpu, pair):
                return (
                    f"the weights {pair.cpu.name} in device memory are not those of the file: "
                    "they were laid out wrongly when they were loaded (kernel repack), or overwritten since."
                )
        attended = AttentionCall.of(name, args)
        end = attended.end if attended else 0

        def fresh(value: Given) -> Given:
            """The CPU's value in fresh device memory."""
            if isinstance(value, LayerMemory):
                mine, theirs = sides(value)
                return uploaded(gpu, before or mine.placed_like(theirs, end, gpu.download))
            if isinstance(value, Pair):
                if isinstance(value.cpu, (Records, Weight)):
                    return value.gpu
                if value.parts:
                    return replace(value.gpu, **{name: fresh(part) for name, part in value.parts})
                return gpu.upload(np.ascontiguousarray(value.cpu))
            return take(value, fresh)

        given = [fresh(a) for a in args]
        again: list[tuple[str, Check]] = []

        def compare(seen: Seen, checks: list[Check]) -> None:
            again.extend((seen.variant, check) for check in checks if check.differing.any())

        self._run(name, args, given, self._record(name, given), expected, inner, compare)
        for variant, check in again[:1]:
            same = check.what == first.what and np.array_equal(bits_of(check.gpu), bits_of(first.gpu))
            how = "in the same way" if same else "in another way"
            return f"the kernel {variant} is at fault: given the CPU's inputs in fresh memory it differs {how}."
        return (
            "given the CPU's inputs in fresh memory the same kernel is right: something has overwritten its inputs, or its "
            "result changes from run to run."
        )
