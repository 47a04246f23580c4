"""Products with matrices: of all rows, of the rows of an expert, of groups."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.cpu import embed
from engine.cpu.operations.rows import RowOperations
from engine.cpu.products import dense, matmul, quantize
from engine.cpu.products import experts as mixture
from engine.cpu.products.repack import ROWS, Matrix, Records
from engine.cpu.simd import host
from engine.ops.activation import Activation

f32 = np.float32

HOST = host()
"""The instruction set that kernels are made for."""

Quantized = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows as products take them: int8 [rows, K], scales float32 [rows, K / unit], sums of 16 int16 [rows, K / 16]."""

_NOTHING = np.zeros((0, 0), f32)


class Pairs(NamedTuple):
    """Pairs of a row and one of its experts, grouped by expert (``engine/cpu/products/experts.py``).

    order int32 [pairs]; used int32 [most groups]; starts int32 [most groups + 1]; n_groups int32 [1].
    """

    order: np.ndarray
    used: np.ndarray
    starts: np.ndarray
    n_groups: np.ndarray


class ProductOperations(RowOperations):
    """Rows are quantized once for all matrices that they are multiplied by."""

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._drafts = False

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
        product = matmul.matmul_step if rows == 1 else self._kernel_for(rows)
        outputs = []
        for i, weight in enumerate(weights):
            out = self.empty((rows, weight.rows))
            if isinstance(weight, Records):
                kernel = product(weight.format.name, HOST)
                given = weight.data[0], *quantized[weight.format.unit], residual, out
                items = weight.data.shape[1]
                self.do(kernel, *given, items=items, ns=rows * columns / 8.0, joined=i > 0, multiple=pairs)
            else:
                name, floats, n = weight.format.name, (weight.data, x, residual, out), weight.rows
                if rows <= matmul.FEW:
                    self.do(dense.matmul_float(name), *floats, items=n, ns=rows * columns / 8.0, joined=i > 0)
                else:
                    kernel, ns = dense.matmul_float_rows(name, HOST), rows * columns / 64.0
                    self.do(kernel, *floats, items=n, ns=ns, joined=i > 0, multiple=ROWS)
            outputs.append(out)
        return outputs

    def _kernel_for(self, rows: int) -> Any:
        """What multiplies by so many activation rows, more than one."""
        if self._drafts and rows <= matmul.FEW:
            return matmul.matmul_few
        if self._drafts and rows <= matmul.SOME and HOST == "vnni512":
            return matmul.matmul_some
        return matmul.matmul_rows

    def _quantized(self, shape: tuple[int, ...], unit: int) -> Quantized:
        """Memory for quantized rows of the shape [rows, columns]."""
        rows, columns = shape
        q = self.empty((rows, columns), np.int8)
        return q, self.empty((rows, columns // unit)), self.empty((rows, columns // 16), np.int16)

    def _quantize(self, x: np.ndarray, unit: int) -> Quantized:
        q, d, s = self._quantized(x.shape, unit)
        self.do(quantize.quantize_rows, x, unit, q, d, s, items=d.size, ns=unit / 4)
        return q, d, s

    def _quantize_activated(
        self, activation: Activation, gate: np.ndarray, up: np.ndarray, unit: int
    ) -> tuple[np.ndarray, Quantized]:
        """The activation of gate and up [rows, columns], and its rows quantized."""
        y, (q, d, s) = self.empty(up.shape), self._quantized(up.shape, unit)
        given = gate.reshape(-1), up.reshape(-1), *map(f32, activation.numbers), y.reshape(-1)
        kernel = quantize.quantize_activated(activation.kind)
        self.do(kernel, *given, unit, q, d, s, items=d.size, ns=1.0 * unit)
        return y, (q, d, s)

    def grouped_matmul(self, x: np.ndarray, weight: Matrix, n_group: int) -> np.ndarray:
        rows = x.shape[0]
        # As experts: pair row * n_group + g uses the matrix g.
        starts = np.arange(n_group + 1, dtype=np.int32)
        order = np.arange(rows * n_group, dtype=np.int32).reshape(rows, n_group).T.reshape(-1).copy()
        pairs = Pairs(order, starts[:-1].copy(), starts * np.int32(rows), np.array([n_group], np.int32))
        (y,) = self._expert_products(x.reshape(rows * n_group, -1), pairs, weight)
        return y.reshape(rows, -1)

    def _expert_products(
        self, x: np.ndarray, pairs: Pairs, *weights: Matrix, quantized: Mapping[int, Quantized] | None = None
    ) -> list[np.ndarray]:
        """Rows of x times the matrices of their experts: float32 [pairs, R] for each weight.  x has a row for each pair, or
        one for all pairs of a row.  quantized: x for each unit of the weights, if it has been quantized already."""
        n, columns = pairs.order.size, x.shape[1]
        share = n // x.shape[0]
        if quantized is None:
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
                each, multiple = weight.data.shape[1], 1
            else:
                kernel = mixture.matmul_float_experts(weight.format.name, HOST)
                matrix = weight.data, weight.first, weight.pitch or n_rows, x
                each, multiple = n_rows, ROWS
            given = *matrix, pairs.order, share, *pairs[1:], out
            items, ns = pairs.used.size * each, columns / 8.0 * -(-n // pairs.used.size)
            self.do(kernel, *given, items=items, ns=ns, joined=i > 0, multiple=multiple)
            outputs.append(out)
        return outputs
