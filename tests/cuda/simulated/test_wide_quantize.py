"""Activations of many rows in the layouts of products of warpgroups, against the law on the CPU."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu import glu
from engine.cpu.products.quantize import quantize_rows
from engine.cuda.products import quantize, wide_quantize
from engine.cuda.runtime.simulator import run
from engine.verify.layout import activations


@pytest.mark.parametrize(
    ("source", "rows", "columns", "layout"), [("swiglu", 19, 512, 4), ("plain", 33, 256, 8), ("geglu", 8, 768, 4)]
)
def test_tiles_are_quantized(source: str, rows: int, columns: int, layout: int) -> None:
    """Some rows of a tile do not exist, units of zeros do, and their words are those of the law."""
    random = np.random.default_rng(rows)
    gate, up = (random.standard_normal((rows, columns)).astype(np.float32) for _ in range(2))
    up[1, :256] = 0.0
    x, zero = up.copy(), np.float32(0)
    if source != "plain":
        glu.activate(source)(gate.reshape(-1), up.reshape(-1), *[zero] * 4, x.reshape(-1), 0, x.size)
    blocks = np.zeros(quantize.activation_words(256, rows, columns, layout)[0], np.uint32)
    arguments: list[Any] = [gate, up, rows, 0.0, 0.0, 0.0, 0.0, blocks]
    kernel = wide_quantize.wide_quantize(source, layout)
    run(kernel, wide_quantize.grid(rows, columns), quantize.RUN, arguments, seed=1)
    q, d = np.empty((rows, columns), np.int8), np.empty((rows, columns // 256), np.float32)
    sums = np.empty((rows, columns // 16), np.int16)
    quantize_rows(x, 256, q, d, sums, 0, d.size)
    found = activations(256, rows, columns, blocks.reshape(-1, quantize.block_parts(layout)[2]))
    assert found[0].tobytes() == q.tobytes() and found[1].tobytes() == d.tobytes()
    assert np.array_equal(found[2], sums)
