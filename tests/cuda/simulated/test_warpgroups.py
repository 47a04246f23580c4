"""The laws of the atoms of warpgroups against independent formulations, and the errors that the simulator reports."""

from typing import Any

import numpy as np
import pytest
from numba import cuda

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from docs.figures.warpgroup import core_matrices as placed
from engine.cuda import warpgroups
from engine.cuda.intrinsics import advance, let_next_begin, pointer, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Kernel, i32
from engine.cuda.runtime.simulator import DivergenceError, run
from engine.cuda.warpgroups import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    barriers_ready,
    bulk_copy,
    make_half_products,
    make_low_products,
    make_step_products,
    matrices,
)

I = np.int32  # noqa: E741

COLUMNS = 16
BARRIER_AT = 64 * COLUMNS


def launch(function: Any, arguments: tuple[Any, ...], args: list[Any], threads: int = 32) -> None:
    kernel = Kernel("tested", arguments, lambda: cuda.jit(function), shared=4 * (BARRIER_AT + 2))
    run(kernel(), 1, threads, args, seed=1)


def fragments(rows: np.ndarray) -> np.ndarray:
    """The words of each lane, uint32 [32, words], of 16 rows, by the documented places: lane 4 g + t has words t and t + 4 of
    rows g and g + 8 of each eight words."""
    words = rows.view(np.uint32)
    return np.array(
        [
            [words[g + 8 * (k % 2), 8 * j + t + 4 * (k // 2)] for j in range(words.shape[1] // 8) for k in range(4)]
            for g in range(8)
            for t in range(4)
        ]
    )


def core_matrices(columns: np.ndarray) -> np.ndarray:
    """Columns of words [n, k] as core matrices: four words of each of eight columns."""
    words = np.ascontiguousarray(columns).view(np.uint32)
    n, k = words.shape
    return np.array(
        [words[8 * i + c, 4 * j + w] for i in range(n // 8) for j in range(k // 4) for c in range(8) for w in range(4)]
    )


def test_a_figure_has_the_places_of_core_matrices() -> None:
    """The words that ``core_matrices`` orders, whose order the tests of products verify, are where the figure says."""
    x = np.random.default_rng(0).integers(0, 2**32, (32, 64), np.uint32)
    assert np.array_equal(core_matrices(x)[placed(4)], x)


def results(found: np.ndarray) -> np.ndarray:
    """[16, columns] of what lanes got, [32, columns / 2], by the documented places."""
    out = np.empty((16, COLUMNS), found.dtype)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for n in range(COLUMNS // 8):
            for k in range(4):
                out[g + 8 * (k // 2), 8 * n + 2 * t + k % 2] = found[lane, 4 * n + k]
    return out


def test_every_atom_has_a_law() -> None:
    from numba.core.extending import _Intrinsic

    assert [name for name, value in vars(warpgroups).items() if isinstance(value, _Intrinsic)] == []


def random_planes(signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A high plane, a low one, and columns."""
    rng = np.random.default_rng(0)
    high = rng.integers(*((-128, 128) if signed else (0, 256)), (16, 256)).astype(np.int8 if signed else np.uint8)
    return (
        high,
        rng.integers(0, 256, (16, 256)).astype(np.uint8),
        rng.integers(-127, 128, (COLUMNS, 256)).astype(np.int8),
    )


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("planes", [1, 2])
def test_products_in_steps(signed: bool, planes: int) -> None:
    begin, add, finish = make_step_products(COLUMNS, signed, planes)
    n = planes * COLUMNS // 2

    def kernel(given, x, out):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        lane = I(cuda.threadIdx.x)
        dots = cuda.local.array(n, np.int32)
        wait_for_inputs()
        for k in range(lane, 64 * COLUMNS, 32):
            shared[k] = x[k]
        cuda.syncthreads()
        own, place = advance(given, I(32 * planes * lane)), matrices(shared, I(0))
        for j in range(8):
            words = tuple(own[32 * m + 4 * j + k] for m in range(planes) for k in range(4))
            (add if j > 0 else begin)(words, place, I(j), dots)
        finish(dots)
        for k in range(n):
            out[lane * n + k] = dots[k]

    high, low, x = random_planes(signed)
    out = np.zeros((32, n), np.int32)
    words = np.concatenate([fragments(plane) for plane in (high, low)[:planes]], axis=1)
    launch(kernel, (U32P, U32P, I32P), [words, core_matrices(x), out])
    for found, plane in zip(np.split(out, planes, axis=1), (high, low), strict=False):
        assert np.array_equal(results(found), plane.astype(np.int64) @ x.astype(np.int64).T)


@pytest.mark.parametrize(("shift", "signed"), [(3, False), (8, True)])
def test_products_of_the_low_plane(shift: int, signed: bool) -> None:
    begin, add, _ = make_step_products(COLUMNS, signed, 1)
    low_products = make_low_products(COLUMNS, shift)

    def kernel(given, x, out):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        lane = I(cuda.threadIdx.x)
        own, dots = cuda.local.array(32, np.uint32), cuda.local.array(COLUMNS // 2, np.int32)
        if lane == 0:
            barrier_init(shared, I(BARRIER_AT), I(1))
            barriers_ready()
        cuda.syncthreads()
        wait_for_inputs()
        if lane == 0:
            barrier_expect(shared, I(BARRIER_AT), I(256 * COLUMNS))
            bulk_copy(shared, I(0), x, I(256 * COLUMNS), shared, I(BARRIER_AT))
        given, place = advance(given, I(64 * lane)), matrices(shared, I(0))
        for k in range(32):
            own[k] = given[32 + k]
        barrier_wait(shared, I(BARRIER_AT), I(0))
        for j in range(8):
            (add if j > 0 else begin)(tuple(given[4 * j + k] for k in range(4)), place, I(j), dots)
        low_products(own, place, dots)
        for k in range(COLUMNS // 2):
            out[lane * (COLUMNS // 2) + k] = dots[k]

    high, low, x = random_planes(signed)
    out = np.zeros((32, COLUMNS // 2), np.int32)
    launch(
        kernel, (U32P, U32P, I32P), [np.concatenate([fragments(high), fragments(low)], axis=1), core_matrices(x), out]
    )
    top, rest = (plane.astype(np.int64) @ x.astype(np.int64).T for plane in (high, low))
    assert np.array_equal(results(out), (top << shift) + rest)


def test_products_of_halves() -> None:
    products = make_half_products(COLUMNS)

    def kernel(a, y, out):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        lane = I(cuda.threadIdx.x)
        sums = cuda.local.array(COLUMNS // 2, np.float32)
        wait_for_inputs()
        for k in range(lane, 8 * COLUMNS, 32):
            shared[k] = y[k]
        cuda.syncthreads()
        a = advance(a, I(4 * lane))
        products((a[0], a[1], a[2], a[3]), shared, I(0), sums)
        for k in range(COLUMNS // 2):
            out[lane * (COLUMNS // 2) + k] = sums[k]

    rng = np.random.default_rng(0)
    a, y = rng.integers(0, 64, (16, 16)), rng.integers(-2032, 2033, (COLUMNS, 16))
    out = np.zeros((32, COLUMNS // 2), np.float32)
    arguments = [fragments(a.astype(np.float16)), core_matrices(y.astype(np.float16)), out]
    launch(kernel, (U32P, U32P, F32P), arguments)
    assert np.array_equal(results(out), a @ y.T)


def copies(x, out, bytes_expected, arrivals, shifted, waits):
    let_next_begin()
    shared = pointer(cuda.shared.array(0, np.uint32, 128))
    wait_for_inputs()
    if cuda.threadIdx.x == 0:
        barrier_init(shared, I(BARRIER_AT), I(1))
        barriers_ready()
        barrier_expect(shared, I(BARRIER_AT), I(bytes_expected))
        bulk_copy(shared, I(shifted), x, I(16), shared, I(BARRIER_AT))
        for _ in range(arrivals):
            barrier_arrive(shared, I(BARRIER_AT))
    cuda.syncthreads()
    if waits:
        barrier_wait(shared, I(BARRIER_AT), I(0))
    if cuda.threadIdx.x == 0:
        for k in range(4):
            out[k] = shared[k]


COPIES = (U32P, U32P, i32, i32, i32, i32)


def test_a_copy_is_there_after_the_wait() -> None:
    x, out = np.arange(1, 5, dtype=np.uint32), np.zeros(4, np.uint32)
    launch(copies, COPIES, [x, out, 16, 0, 0, 1])
    assert out.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((16, 1, 0, 1), RuntimeError, "more threads arrive"),
        ((32, 0, 0, 1), DivergenceError, "barrier_wait"),
        ((16, 0, 1, 1), ValueError, "not aligned to 16 bytes"),
    ],
)
def test_what_would_hang_or_be_undefined(arguments: tuple[int, ...], error: type[Exception], message: str) -> None:
    x, out = np.arange(1, 5, dtype=np.uint32), np.zeros(4, np.uint32)
    with pytest.raises(error, match=message):
        launch(copies, COPIES, [x, out, *arguments])


def test_a_copy_that_is_not_waited_for_is_not_there() -> None:
    x, out = np.arange(1, 5, dtype=np.uint32), np.zeros(4, np.uint32)
    launch(copies, COPIES, [x, out, 16, 0, 0, 0])
    assert out.tolist() != x.tolist()
