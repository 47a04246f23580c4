"""Products of heads: each head of each row is multiplied by the matrix of the head.

Formula: out[t, h, r] = sum_k weight[h, r, k] * x[t, h, k]; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: the matrices of all heads form one of n_head * R rows: rows [h R, (h + 1) R) are those of head h.  Activations are
    int8 in the layout of ``engine/cuda/products/quantize.py``, [rows, n_head * K] for ``matmul_heads``; out float32 [rows,
    n_head, R].  A *pair* is a row and a head, row * n_head + head; listed int32 [pairs], items int32 [``n_items``, 4] as in
    ``engine/cuda/products/wide_experts.py``, which multiplies many rows: heads are experts that every row has chosen.
Who owns what: ``matmul_heads``: a block owns 16 rows of the matrix of a head, for all activation rows; a warp a chain.
    ``matmul_heads_float``: a warp owns a row of the matrix of a pair's head.  ``list_heads``: a block owns a head.
Reduction order: that of ``engine/cuda/products/matmul.py``.
Bytes moved: the matrices of all heads once, or for float formats once per row, from the L2 cache.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.fold import fold32
from engine.cuda.intrinsics import advance, fma, let_next_begin, pointer, wait_for_inputs
from engine.cuda.products import wide_experts
from engine.cuda.products.chain import make_chain
from engine.cuda.products.experts import resident, tiles
from engine.cuda.products.matmul import compiled_rows, make_load_float, warps
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.cuda.runtime.values import Deferred, plain, quantized
from engine.gguf.quants import CHAINS, FORMATS

f32 = np.float32
I = np.int32  # noqa: E741

LISTERS = 256
"""Threads of a block of ``list_heads``."""


@kernel(
    *(U32P, F32P, i32, i32, i32, U32P, F32P, U32P),
    threads=32 * CHAINS,
    blocks=lambda format, most: resident((format,), most),
)
def matmul_heads(format: str, most: int) -> KernelCode:
    """The matrices of all heads, w, times the activations of up to ``most`` rows, 1, 8 or 16; units: those of K.

    Grid: (``tiles(R)``, n_head) blocks of 32 * ``warps(units, False)`` threads.
    """
    kind = T[format]
    chain, size, unit = make_chain(kind, most, False, False), 4 * FORMATS[kind].unit_bytes, FORMATS[kind].unit
    q_words, s_words = 2 * unit, {256: 96, 32: 8}.get(unit, 0)
    row_tiles, columns = -(-most // 8), min(most, 2)
    n_acc, n_columns = 4 * row_tiles, 1 if most == 1 else 8 * row_tiles
    n_parts = CHAINS * 16 * n_columns

    @cuda.jit
    def matmul_heads(w, out, rows, n_rows, units, q, d, s):
        let_next_begin()
        parts = pointer(cuda.shared.array(n_parts, np.float32))
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        length = I((units + CHAINS - 1) // CHAINS)
        first = I(warp * length)
        last = min(I(first + length), units)
        tile, head, n_head = I(cuda.blockIdx.x), I(cuda.blockIdx.y), I(cuda.gridDim.y)
        origin, at = I(head * n_rows), I(head * units)
        # The tile's first row, negative if the matrix of the head begins inside a record.
        low = I(16 * tile - (origin & 15))
        if low >= n_rows:
            wait_for_inputs()
            return
        for k in range(n_acc):
            acc[k] = f32(0.0)
        records = advance(w, np.int64(I(I(I((origin >> 4) + tile) * units) + first)) * size)
        own = advance(q, I(at * q_words)), advance(d, I(at * 8)), advance(s, I(at * s_words))
        chain(records, first, last, I(n_head * units), rows, own[0], own[1], own[2], acc)
        column = I(2 * (lane & 3))
        if columns > 1 or column == 0:
            own_parts = advance(parts, I(warp * (16 * n_columns) + 16 * column + (lane >> 2)))
            for n in range(row_tiles):
                for c in range(columns):
                    own_parts[(8 * n + c) * 16] = acc[4 * n + c]
                    own_parts[(8 * n + c) * 16 + 8] = acc[4 * n + 2 + c]
        cuda.syncthreads()
        i = thread
        while i < 16 * rows:
            r = I(low + (i & 15))
            if r >= 0 and r < n_rows:
                total = f32(0.0)
                for c in range(CHAINS):
                    if c * 32 < cuda.blockDim.x:
                        total = total + parts[c * (16 * n_columns) + i]
                out[np.int64(I(I(i >> 4) * n_head + head)) * n_rows + r] = total
            i = I(i + cuda.blockDim.x)

    return matmul_heads


@kernel(U32P, F32P, i32, i32, i32, F32P, threads=256)
def matmul_heads_float(format: str) -> KernelCode:
    """The matrices of all heads, of a float format, times float32 activations [pairs, K].  Grid: (pairs, ceil(R / 8)), of 8
    warps."""
    load_float = make_load_float(T[format])

    @cuda.jit
    def matmul_heads_float(weight, x, n_head, columns, n_rows, out):
        let_next_begin()
        lane, pair = I(cuda.threadIdx.x & 31), I(cuda.blockIdx.x)
        r = I(cuda.blockIdx.y * 8 + (cuda.threadIdx.x >> 5))
        wait_for_inputs()
        if r < n_rows:
            base = np.int64(I(I(pair % n_head) * n_rows + r)) * columns
            x = advance(x, np.int64(pair) * columns)
            acc = f32(0.0)
            for k in range(lane, columns, 32):
                acc = fma(load_float(weight, base + k), x[k], acc)
            total = fold32(acc)
            if lane == 0:
                out[np.int64(pair) * n_rows + r] = total

    return matmul_heads_float


@kernel(i32, i32, I32P, I32P, threads=LISTERS)
def list_heads() -> KernelCode:
    """The pairs of each head, and items of ``wide_experts.COLUMNS`` of them.  Arguments: rows, items per head, listed, items.
    Grid: n_head blocks of ``LISTERS``."""
    columns = wide_experts.COLUMNS

    @cuda.jit
    def list_heads(rows, of_head, listed, items):
        let_next_begin()
        head, n_head = I(cuda.blockIdx.x), I(cuda.gridDim.x)
        wait_for_inputs()
        t = I(cuda.threadIdx.x)
        while t < rows:
            listed[I(head * rows + t)] = I(t * n_head + head)
            t = I(t + LISTERS)
        j = I(cuda.threadIdx.x)
        while j < of_head:
            item = advance(items, I(4 * I(head * of_head + j)))
            item[0] = head
            item[1] = I(head * rows + j * columns)
            item[2] = min(I(columns), I(rows - j * columns))
            item[3] = I(0)
            j = I(j + LISTERS)

    return list_heads


class HeadProducts:
    """The launches of the products of ``rows`` rows with the matrices of n_head heads."""

    def __init__(self, recorder: Recorder, rows: int, n_head: int) -> None:
        self._recorder, self._rows, self._n_head = recorder, rows, n_head
        self._lists: tuple[Tensor, Tensor] | None = None

    def multiply(self, x: Tensor | Deferred, weight: DeviceWeight) -> Tensor:
        """Record x [rows, n_head * K] times the matrices [n_head * R, K]: float32 [rows, n_head, R]."""
        recorder, rows, n_head = self._recorder, self._rows, self._n_head
        n_rows, entry = weight.rows // n_head, weight.format
        out = recorder.empty((rows, n_head, n_rows))
        if not entry.quantized:
            arguments = (weight, plain(recorder, x), n_head, weight.columns, n_rows, out)
            grid = (rows * n_head, -(-n_rows // 8))
            recorder.launch(matmul_heads_float(entry.name), grid, 256, arguments, result=out)
            return out
        units = weight.columns // entry.unit
        if rows > NARROW_ROWS:
            by_pair = plain(recorder, x).reshape(rows * n_head, weight.columns)
            self._multiply_wide(quantized(recorder, by_pair, entry.unit, rows), weight, units, n_rows, out)
            return out
        given = (weight, out, rows, n_rows, units, *quantized(recorder, x, entry.unit))
        kernel = matmul_heads(entry.name, compiled_rows(rows))
        recorder.launch(kernel, (tiles(n_rows), n_head), 32 * warps(units, False), given, result=out)
        return out

    def _multiply_wide(self, x: Int8, weight: DeviceWeight, units: int, n_rows: int, out: Tensor) -> None:
        recorder, (listed, items) = self._recorder, self._list()
        n_tiles = tiles(n_rows)
        sizes = 1, items.shape[0], n_tiles
        kernel, grid, threads = wide_experts.geometry(weight.format.name, *sizes, recorder.device.shared_memory)
        arguments = (*(weight, weight, out, out, items, listed, 0, 0, 0, 0), *(n_tiles, n_tiles, n_rows, units, *x))
        recorder.launch(kernel, grid, threads, arguments, result=out)

    def _list(self) -> tuple[Tensor, Tensor]:
        """The pairs of each head, and the work items of a product's blocks, made once for all products."""
        if self._lists is None:
            recorder, rows, n_head = self._recorder, self._rows, self._n_head
            of_head = -(-rows // wide_experts.COLUMNS)
            listed = recorder.empty((rows * n_head,), np.int32)
            items = recorder.empty((n_head * of_head, 4), np.int32)
            recorder.launch(
                list_heads(), (n_head,), LISTERS, (rows, of_head, listed, items), listed=listed, items=items
            )
            self._lists = listed, items
        return self._lists
