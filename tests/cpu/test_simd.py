"""The vector language against NumPy, with every instruction set that this CPU has."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.cpu import simd
from engine.cpu.simd import F16, F32, I8, I16, I32, Code, Vec, data_of
from tests.tiers import examples

TABLE = [5, -1, 127, -128, 0, 9, 77, 3, -9, 100, -100, 33, 2, 1, 4, -77]

OPERATIONS: dict[str, Callable[[Code, Vec, Vec], Vec]] = {
    "and": lambda code, x, y: x & y,
    "or": lambda code, x, y: x | 96,
    "xor": lambda code, x, y: x ^ y,
    "add": lambda code, x, y: x + y,
    "subtract": lambda code, x, y: x - 200,
    "negate": lambda code, x, y: -x,
    "multiply": lambda code, x, y: (x.view(I16) * y.view(I16)).view(I8),
    "left": lambda code, x, y: (x.view(I32) << 5).view(I8),
    "right": lambda code, x, y: (x.view(I32) >> 5).view(I8),
    "arithmetic": lambda code, x, y: x.view(I16).arithmetic_shift(3).view(I8),
    "bits": lambda code, x, y: x.bits(3, 30),
    "shuffle": lambda code, x, y: x.shuffle([63 - 2 * i for i in range(32)], y),
    "join": lambda code, x, y: code.join([y.shuffle(range(8)), x.shuffle(range(8))] * 2),
    "wider": lambda code, x, y: (x.shuffle(range(16)).signed(I16) - y.shuffle(range(16)).unsigned(I16)).view(I8),
    "narrow": lambda code, x, y: code.join([x.view(I16).narrow(I8), y.view(I16).narrow(I8)]),
    "select": lambda code, x, y: x.select(y.below_zero(), y),
    "zero": lambda code, x, y: x.select((y & 3).is_zero(), 7),
    "larger": lambda code, x, y: code.larger(x.view(I32), y.view(I32)).view(I8),
    "magnitude": lambda code, x, y: code.magnitude(x),
    "moved_sign": lambda code, x, y: code.moved_sign(x, y),
    "lookup": lambda code, x, y: code.lookup(x & 15, TABLE),
    "pairs8": lambda code, x, y: code.pairs8(x & 127, y).view(I8),
    "pairs16": lambda code, x, y: code.pairs16(x.view(I16), y.view(I16)).view(I8),
    "half": lambda code, x, y: ((x & 59).shuffle(range(16)).view(F16).to_float() * 0.5).view(I8),
    "float": lambda code, x, y: (x.view(I32).to_float() - y.view(I32).to_float() + 1.0).view(I8),
    "fma": lambda code, x, y: (x.view(I32) >> 8).to_float().fma((y.view(I32) >> 8).to_float(), code.zeros(F32)).view(I8),
    "gather": lambda code, x, y: code.gather(
        code.bytes("table_of_words", bytes(range(256))), code.scalars(x.view(I32) & 63), 1
    )[0].view(I8),
    "gather_low": lambda code, x, y: code.gather(
        code.bytes("table_of_words", bytes(range(256))), code.scalars(x.view(I32) & 31), 2
    )[0].view(I8),
    "gather_high": lambda code, x, y: code.gather(
        code.bytes("table_of_words", bytes(range(256))), code.scalars(x.view(I32) & 31), 2
    )[1].view(I8),
    "dot4": lambda code, x, y: code.dot4(x.view(I32), x, y).view(I8),
}  # fmt: skip


def expected(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the operation makes of int8 x and y [32]."""
    a, b = x.astype(int), y.astype(int)
    words, others = x.view(np.int32).astype(np.int64), y.view(np.int32).astype(np.int64)
    pairs = (x.view(np.int16).astype(int), y.view(np.int16).astype(int))
    sums = {
        "and": lambda: a & b,
        "or": lambda: a | 96,
        "xor": lambda: a ^ b,
        "add": lambda: a + b,
        "subtract": lambda: a - 200,
        "negate": lambda: -a,
        "multiply": lambda: (pairs[0] * pairs[1]).astype(np.int16),
        "left": lambda: (words << 5).astype(np.int32),
        "right": lambda: x.view(np.uint32) >> 5,
        "arithmetic": lambda: x.view(np.int16) >> 3,
        "bits": lambda: (x.view(np.uint8) >> 3) & 30,
        "shuffle": lambda: np.concatenate([a, b])[[63 - 2 * i for i in range(32)]],
        "join": lambda: np.concatenate([b[:8], a[:8]] * 2),
        "wider": lambda: (a[:16] - y[:16].view(np.uint8)).astype(np.int16),
        "narrow": lambda: np.concatenate([a[::2], b[::2]]),
        "select": lambda: np.where(b < 0, a, b),
        "zero": lambda: np.where(b & 3 == 0, a, 7),
        "larger": lambda: np.maximum(words, others).astype(np.int32),
        "magnitude": lambda: np.abs(a),
        # vpsignb gives 0 where x is 0; there only the product counts.
        "moved_sign": lambda: np.where(a < 0, -b, b),
        "lookup": lambda: np.array(TABLE)[a & 15],
        "pairs8": lambda: ((a & 127) * b).reshape(-1, 2).sum(axis=1).astype(np.int16),
        "pairs16": lambda: (pairs[0] * pairs[1]).reshape(-1, 2).sum(axis=1).astype(np.int32),
        "half": lambda: (x & 59)[:16].view(np.float16).astype(np.float32) * np.float32(0.5),
        "float": lambda: words.astype(np.float32) - others.astype(np.float32) + np.float32(1),
        "fma": lambda: ((x.view(np.uint32) >> 8).astype(float) * (y.view(np.uint32) >> 8)).astype(np.float32),
        "gather": lambda: np.arange(256, dtype=np.uint8).view(np.int32)[words & 63],
        "gather_low": lambda: np.arange(256, dtype=np.uint8).view(np.int32)[2 * (words & 31)],
        "gather_high": lambda: np.arange(256, dtype=np.uint8).view(np.int32)[2 * (words & 31) + 1],
        "dot4": lambda: (words + (x.view(np.uint8).astype(int) * b).reshape(-1, 4).sum(axis=1)).astype(np.int32),
    }
    value = sums[name]()
    return value.astype(np.int8) if value.size == 32 and value.dtype.itemsize == 8 else value.view(np.int8)


def kernel_of(instructions: str) -> tuple[list[str], Any]:
    """The names of the operations, and a function that computes all of them: int8 x, y [32] to out [n, 32]."""
    names = [name for name in OPERATIONS if name != "dot4" or instructions.startswith("vnni")]

    @intrinsic
    def operations(typingctx, x, y, out):
        def codegen(context, builder, sig, args):
            code = Code(builder, instructions)
            a, b, c = (data_of(context, builder, kind, array) for kind, array in zip(sig.args, args, strict=True))
            for i, name in enumerate(names):
                code.store(OPERATIONS[name](code, code.load(a, 0), code.load(b, 0)), c, 32 * i)
            return context.get_dummy_value()

        return types.void(x, y, out), codegen

    @njit
    def compute(x, y, out):
        operations(x, y, out)

    return names, compute


COMPILED: dict[str, tuple[list[str], Any]] = {}
BYTES = st.lists(st.integers(-127, 127), min_size=32, max_size=32)


@pytest.mark.parametrize("instructions", simd.INSTRUCTION_SETS[1:])
@given(first=BYTES, second=BYTES)
@examples(60)
def test_operations(instructions: str, first: list[int], second: list[int]) -> None:
    if instructions not in simd.available():
        pytest.skip(f"this CPU has no {instructions}")
    if instructions not in COMPILED:
        COMPILED[instructions] = kernel_of(instructions)
    names, compute = COMPILED[instructions]
    x, y = np.array(first, np.int8), np.array(second, np.int8)
    out = np.zeros((len(names), 32), np.int8)
    compute(x, y, out)
    for i, name in enumerate(names):
        theirs = expected(name, x, y)
        if name == "moved_sign":
            assert (x.astype(int) * y == np.abs(x.astype(int)) * out[i]).all()
        else:
            assert out[i, : theirs.size].tobytes() == theirs.tobytes(), name


def test_loops_and_variables() -> None:
    @intrinsic
    def total(typingctx, x, n, out):
        def codegen(context, builder, sig, args):
            code = Code(builder, "plain")
            pointer, target = (data_of(context, builder, sig.args[i], args[i]) for i in (0, 2))
            held = code.variable(code.zeros(I32, 8))
            with code.loop(code.times(args[1], 32), 0, 32) as i:
                held.set(held.get() + code.load(pointer, i, I32, 8))
            code.store(held.get(), target)
            code.store(code.splat(pointer, 4, I32), target, 32)
            smaller = code.minimum(args[1], ir.Constant(args[1].type, 2))
            code.store(code.repeat(builder.trunc(smaller, I32), 8), target, 64)
            return context.get_dummy_value()

        return types.void(x, n, out), codegen

    @njit
    def compute(x, n, out):
        total(x, n, out)

    x, out = np.arange(40, dtype=np.int32), np.zeros((3, 8), np.int32)
    for n in (0, 1, 5):
        compute(x, n, out)
        assert out[0].tolist() == x[: 8 * n].reshape(n, 8).sum(axis=0).tolist()
        assert out[1].tolist() == [1] * 8
        assert out[2].tolist() == [min(n, 2)] * 8


def test_kernels_need_contiguous_arrays() -> None:
    _, compute = kernel_of("plain")
    with pytest.raises(TypeError, match="contiguous"):
        compute(np.zeros(64, np.int8)[::2], np.zeros(32, np.int8), np.zeros((40, 32), np.int8))
