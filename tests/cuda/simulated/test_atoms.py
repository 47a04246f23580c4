"""The laws of the GPU's atoms against independent formulations, and what the simulator reports instead of hanging."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, njit
from numba.core import types
from numba.cuda.core import config

from engine import numerics
from engine.cuda import intrinsics
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    copy1,
    copy4,
    dot2_high,
    dot2_high_signed,
    dot2_low,
    dot2_low_signed,
    exp,
    float_bits,
    float_to_half,
    fma,
    gumbel,
    half_to_float,
    hold,
    keep4,
    lane_from,
    lane_of_four,
    lane_xor,
    lane_xor_int,
    lanes_max,
    let_next_begin,
    load1,
    load2,
    load4,
    mma16,
    mma32,
    mma_half,
    pick_bytes,
    pointer,
    prefetch,
    round_product,
    settled,
    silu,
    stream1,
    stream2,
    stream4,
    vector2,
    vector4,
    wait_for_inputs,
)
from engine.cuda.runtime.compiler import F32P, I32P, U8P, U16P, U32P, U64P, Kernel, f32, i32, u64
from engine.cuda.runtime.simulator import DivergenceError, Pointer, run

if not config.ENABLE_CUDASIM:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

ANY = settings(deadline=None, max_examples=100)
words = st.integers(0, 2**32 - 1)
ints = st.integers(-(2**31), 2**31 - 1)
u32 = np.uint32
F = np.float32


def launch(
    function: Any, arguments: tuple[Any, ...], args: list[Any], grid: Any = 1, block: Any = 32, **options: Any
) -> None:
    run(Kernel("tested", arguments, lambda: cuda.jit(function))(), grid, block, args, **options)


def wrapped(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def test_every_atom_has_a_law() -> None:
    from numba.core.extending import _Intrinsic

    names = {name: value for name, value in vars(intrinsics).items() if not name.startswith("_")}
    assert [name for name, value in names.items() if isinstance(value, _Intrinsic)] == []


# --- integers --------------------------------------------------------------------------------------------------


@given(words, words, ints)
@ANY
def test_dot2(a: int, b: int, c: int) -> None:
    shorts = struct.unpack("<2h", struct.pack("<I", a))
    unsigned, signed = (struct.unpack(f"<4{kind}", struct.pack("<I", b)) for kind in "Bb")
    cases = (
        (dot2_low, unsigned[:2]),
        (dot2_high, unsigned[2:]),
        (dot2_low_signed, signed[:2]),
        (dot2_high_signed, signed[2:]),
    )
    for atom, bytes_ in cases:
        result = atom(u32(a), u32(b), np.int32(c))
        assert type(result) is np.int32
        assert result == wrapped(c + sum(x * y for x, y in zip(shorts, bytes_, strict=True)))


@given(words, words, words)
@ANY
def test_pick_bytes(a: int, b: int, index: int) -> None:
    eight = struct.pack("<II", a, b)
    expected = b""
    for k in range(4):
        sign, which = divmod(index // 16**k % 16, 8)
        expected += b"\xff" * (eight[which] > 127) + b"\0" * (eight[which] < 128) if sign else eight[which : which + 1]
    assert struct.pack("<I", pick_bytes(u32(a), u32(b), u32(index))) == expected
    # Its use in the kernels: a table of 8 bytes.
    assert pick_bytes(u32(0x03020100), u32(0x07060504), u32(0x7250)) == 0x07020500


def products(a, b, sums, deep):
    """Fragments as in the figures of the PTX ISA, from matrices of bytes: a [16, 32] or [16, 16], b [8, 32] or [8, 16]."""
    let_next_begin()
    wait_for_inputs()
    lane = cuda.threadIdx.x
    g, t = lane >> 2, lane & 3
    width = 8 if deep else 4
    a0, a1 = a[g * width + t], a[(g + 8) * width + t]
    b0 = b[g * width + t]
    if deep:
        c = mma32(a0, a1, a[g * width + 4 + t], a[(g + 8) * width + 4 + t], b0, b[g * width + 4 + t])
    else:
        c = mma16(a0, a1, b0)
    sums[8 * g + 2 * t], sums[8 * g + 2 * t + 1] = c[0], c[1]
    sums[8 * (g + 8) + 2 * t], sums[8 * (g + 8) + 2 * t + 1] = c[2], c[3]


@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize("extreme", [False, True])
def test_mma(k: int, extreme: bool) -> None:
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-128, 128, (rows, k)).astype(np.int8) for rows in (16, 8))
    if extreme:
        a[:], b[::2], b[1::2] = -128, -128, 127
    sums = np.zeros((16, 8), np.int32)
    launch(products, (U32P, U32P, I32P, i32), [a, b, sums, k == 32])
    expected = [[sum(int(x) * int(y) for x, y in zip(p, q, strict=True)) for q in b] for p in a]
    assert sums.tolist() == expected


def half_products(a, b, sums):
    """Fragments as in the figures of the PTX ISA, from matrices of float16, two to a word: a [16, 16], b [8, 16]."""
    let_next_begin()
    wait_for_inputs()
    lane = cuda.threadIdx.x
    g, t = lane >> 2, lane & 3
    c = mma_half(
        *(a[8 * g + t], a[8 * (g + 8) + t], a[8 * g + t + 4], a[8 * (g + 8) + t + 4]),
        *(b[8 * g + t], b[8 * g + t + 4]),
    )
    sums[8 * g + 2 * t], sums[8 * g + 2 * t + 1] = c[0], c[1]
    sums[8 * (g + 8) + 2 * t], sums[8 * (g + 8) + 2 * t + 1] = c[2], c[3]


@pytest.mark.parametrize("extreme", [False, True])
def test_mma_half(extreme: bool) -> None:
    """Sums of integers, exact, and never -0."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 64, (16, 16)), rng.integers(-2032, 2033, (8, 16))
    if extreme:
        a[:8], b[::2], b[1::2] = 63, -2032, 2032
        a[8:] = 0
    sums = np.full((16, 8), np.nan, F)
    halves = [np.where(m == 0, -0.0, m).astype(np.float16).view(u32) for m in (a, b)]
    launch(half_products, (U32P, U32P, F32P), [*halves, sums])
    expected = [[sum(int(x) * int(y) for x, y in zip(p, q, strict=True)) for q in b] for p in a]
    assert sums.tolist() == expected and not np.signbit(sums[sums == 0]).any()


# --- exchanges -------------------------------------------------------------------------------------------------


def exchanges(x, n, y, m, z, w, v):
    let_next_begin()
    wait_for_inputs()
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    lane = cuda.threadIdx.x & 31
    total, most = x[i], n[i]
    for k in range(5):
        total = total + lane_xor(total, np.int32(16 >> k))
        most = max(most, lane_xor_int(most, np.int32(1 << k)))
    y[i], m[i], w[i] = total, most, lanes_max(n[i])
    # Each lane may request a different lane.
    z[i] = lane_from(x[i], np.int32((7 * lane + 3) & 31))
    v[i] = lane_of_four(x[settled(i)], np.int32((lane >> 2) & 3))


def test_exchanges() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(192).astype(F)
    n = rng.integers(-(2**31), 2**31, 192).astype(np.int32)
    y, m, z, w, v = (np.zeros(192, kind) for kind in (F, np.int32, F, np.int32, F))
    launch(exchanges, (F32P, I32P, F32P, I32P, F32P, I32P, F32P), [x, n, y, m, z, w, v], 2, 96)
    total = x.reshape(6, 32).copy()
    for k in (16, 8, 4, 2, 1):
        total = total + total[:, np.arange(32) ^ k]
    assert np.array_equal(y.reshape(6, 32), total)
    assert np.array_equal(m.reshape(6, 32), n.reshape(6, 32).max(1, keepdims=True).repeat(32, 1))
    assert np.array_equal(w, m)
    lanes = np.arange(32)
    assert np.array_equal(v.reshape(6, 32), x.reshape(6, 32)[:, lanes & 28 | (lanes >> 2) & 3])
    assert np.array_equal(z.reshape(6, 32), x.reshape(6, 32)[:, (7 * np.arange(32) + 3) % 32])


def block_sum(x, y):
    let_next_begin()
    wait_for_inputs()
    thread = cuda.threadIdx.x + cuda.blockDim.x * cuda.threadIdx.y
    parts = cuda.shared.array(4, F)
    mine = cuda.local.array(2, F)
    mine[0] = x[cuda.blockIdx.x * 128 + thread]
    for k in range(5):
        mine[0] = mine[0] + lane_xor(mine[0], np.int32(16 >> k))
    if thread & 31 == 0:
        parts[thread >> 5] = mine[0]
    cuda.syncthreads()
    if thread == 0:
        y[cuda.blockIdx.x] = (parts[0] + parts[1]) + (parts[2] + parts[3])


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_blocks_with_shared_memory(seed: int | None) -> None:
    x = np.arange(384, dtype=F)
    y = np.zeros(3, F)
    launch(block_sum, (F32P, F32P), [x, y], 3, (64, 2), seed=seed)
    assert y.tolist() == x.reshape(3, 128).sum(1).tolist()


def without_barrier(x, y):
    wait_for_inputs()
    shared = cuda.shared.array(64, F)
    shared[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    y[cuda.threadIdx.x] = shared[cuda.threadIdx.x ^ 1]


def test_a_missing_barrier_shows() -> None:
    """The order shows in what a thread reads: its neighbour has written or not, and unwritten memory is NaN."""
    x, y = np.ones(64, F), np.zeros(64, F)
    launch(without_barrier, (F32P, F32P), [x, y], 1, 64)
    assert np.isnan(y).sum() == 32
    results = set()
    for seed in range(3):
        launch(without_barrier, (F32P, F32P), [x, y], 1, 64, seed=seed)
        results.add(y.tobytes())
    assert len(results) == 3


# --- what is reported ------------------------------------------------------------------------------------------


def half_exchange(x, y):
    wait_for_inputs()
    if cuda.threadIdx.x % 32 < 16:
        y[cuda.threadIdx.x] = lane_xor(x[cuda.threadIdx.x], np.int32(1))


def two_exchanges(x, y):
    wait_for_inputs()
    if cuda.threadIdx.x == 3:
        y[0] = lane_from(x[0], np.int32(1))
    else:
        y[0] = lane_xor(x[0], np.int32(1))


def exchange_or_barrier(x, y):
    wait_for_inputs()
    if cuda.threadIdx.x < 40:
        cuda.syncthreads()
    y[0] = lane_xor(x[0], np.int32(1))


@pytest.mark.parametrize(
    ("function", "block", "message"),
    [
        (half_exchange, 64, "warp 0: lanes 0-15 wait in lane_xor, lanes 16-31 ended; warp 1: lanes 0-15 wait"),
        (two_exchanges, 32, "warp 0: lanes 0-2, 4-31 wait in lane_xor, lanes 3 wait in lane_from"),
        (exchange_or_barrier, 64, "warp 1: lanes 0-7 wait in syncthreads, lanes 8-31 wait in lane_xor"),
        (exchange_or_barrier, 24, "lane_xor needs whole warps, this block has 24 threads"),
    ],
)
def test_divergence(function: Any, block: int, message: str) -> None:
    x, y = np.ones(64, F), np.zeros(64, F)
    with pytest.raises(DivergenceError, match=message):
        launch(function, (F32P, F32P), [x, y], 1, block)


def one_fails(x, y):
    wait_for_inputs()
    i = cuda.threadIdx.x
    y[i] = lane_xor(x[i] if i != 5 else x[i + 1000], np.int32(1))


def test_a_thread_that_fails_ends_the_others() -> None:
    import threading

    x, y = np.ones(64, F), np.zeros(64, F)
    with pytest.raises(IndexError, match="x: element 1005 of an array of 64") as caught:
        launch(one_fails, (F32P, F32P), [x, y], 1, 64)
    assert caught.value.__notes__ == ["in thread (5, 0, 0) of block (0, 0, 0)"]
    assert threading.active_count() == 1
    # The next launch works correctly.
    launch(block_sum, (F32P, F32P), [np.ones(128, F), y], 1, 128)
    assert y[0] == 128


def reads(x, y, at):
    wait_for_inputs()
    y[0] = x[at]


def writes(x, y, at):
    wait_for_inputs()
    y[at] = x[0]


@pytest.mark.parametrize("at", [-1, 8, 2**30])
def test_out_of_bounds(at: int) -> None:
    x, y = np.zeros(8, F), np.zeros(8, F)
    for function, name in ((reads, "x"), (writes, "y")):
        with pytest.raises(IndexError, match=f"{name}: element {at} of an array of 8"):
            launch(function, (F32P, F32P, i32), [x, y, at], 1, 1)
    with pytest.raises(IndexError, match="x: element 0 of an array of 0"):
        launch(reads, (F32P, F32P, i32), [None, y, 0], 1, 1)


def early_write(x, y):
    let_next_begin()
    y[0] = x[0]
    wait_for_inputs()


def no_wait(x, y):
    let_next_begin()
    if cuda.threadIdx.x == 0:
        wait_for_inputs()


def test_wait_for_inputs_is_required() -> None:
    x, y = np.zeros(8, F), np.zeros(8, F)
    with pytest.raises(RuntimeError, match=r"y: element 0 is written before wait_for_inputs\(\)"):
        launch(early_write, (F32P, F32P), [x, y])
    with pytest.raises(RuntimeError, match=r"a thread ended without wait_for_inputs\(\)") as caught:
        launch(no_wait, (F32P, F32P), [x, y])
    assert caught.value.__notes__ == ["in thread (1, 0, 0) of block (0, 0, 0)"]
    launch(no_wait, (F32P, F32P), [x, y], strict=False)


def test_arguments_are_checked() -> None:
    x = np.zeros((4, 4), F)
    with pytest.raises(TypeError, match=r"tested takes 2 arguments \(2 types\), not 1"):
        launch(no_wait, (F32P, F32P), [x])
    with pytest.raises(ValueError, match="y: the array must be contiguous"):
        launch(no_wait, (F32P, F32P), [x, x.T])


# --- pointers and loads ----------------------------------------------------------------------------------------


def copies(x, y, bytes_, halves, longs, a, b, n):
    wait_for_inputs()
    p = advance(advance(x, np.int64(8)), np.int32(-4))
    q = load4(p, 4) + load2(p, np.int32(2)) + stream4(x, 0) + stream2(x, 14) + (stream1(p, 3),)
    hold((q, (n, a)), np.int32(0))
    for k in range(13):
        y[k] = q[k]
    y[17] = load1(p, 3)
    y[13], y[14], y[15] = bytes_[5] << u32(8), halves[1], longs[0] >> np.uint64(32)
    y[16] = int(type(a) is np.float32 and a == F(0.1) and type(b) is np.uint64 and type(n) is np.int32)


def test_loads() -> None:
    x = np.arange(100, 116, dtype=u32)
    y = np.zeros((18, 1), u32)
    bytes_, halves, longs = (
        np.arange(8, dtype=np.int8),
        np.array([1, 0xFFFF], np.uint16),
        np.array([7 << 32], np.uint64),
    )
    launch(copies, (U32P, U32P, U8P, U16P, U64P, f32, u64, i32), [x, y, bytes_, halves, longs, 0.1, 2**63, -1], 1, 1)
    loaded = [108, 109, 110, 111, 106, 107, 100, 101, 102, 103, 114, 115, 107]
    assert y[:, 0].tolist() == [*loaded, 5 << 8, 0xFFFF, 7, 1, 107]


def through_shared_memory(x, y, z):
    wait_for_inputs()
    p = pointer(cuda.shared.array(24, u32, 16))
    q = pointer(cuda.shared.array(4, F, 16))
    copy4(p, 4, x, 8, np.int32(1))
    copy4(p, 0, x, 1000, np.int32(0))
    copy1(p, 9, x, 3, np.int32(1))
    copy1(advance(p, 8), 0, x, 1000, np.int32(0))
    copies_commit()
    copies_wait()
    keep4(p, np.int32(12), u32(1), np.int32(-1), F(2.0), x[2])
    keep4(q, 0, F(0.5), F(-0.0), F(1.5), F(3.0))
    words = vector4(p, 0) + vector4(advance(p, 4), 0) + vector2(p, 8) + vector4(p, 12) + vector2(advance(p, 12), 2)
    for k in range(16):
        y[k] = words[k]
    for k in range(4):
        z[k] = q[k]


def test_shared_memory() -> None:
    x, y, z = np.arange(100, 116, dtype=u32), np.zeros(16, u32), np.zeros(4, F)
    launch(through_shared_memory, (U32P, U32P, F32P), [x, y, z], 1, 1)
    kept = [1, 2**32 - 1, 0x40000000, 102]
    assert y.tolist() == [0, 0, 0, 0, 108, 109, 110, 111, 0, 103, *kept, *kept[2:]]
    assert z.view(u32).tolist() == np.array([0.5, -0.0, 1.5, 3.0], F).view(u32).tolist()


def test_hold() -> None:
    """It stores nothing, so a value that would make it store is an error."""
    hold((u32(1), (F(2.0),)), np.int32(0))
    with pytest.raises(RuntimeError, match="never is not 0"):
        hold((u32(1),), np.int32(1))


def test_prefetch() -> None:
    """It changes nothing, so only what would fail on a GPU is detected."""
    p = Pointer(np.arange(16, dtype=u32), name="p")
    prefetch(p, 4, np.int32(48))
    for i, n_bytes in ((1, 16), (4, 24)):
        with pytest.raises(ValueError, match=f"p: a prefetch of {n_bytes} bytes at byte {4 * i} is not aligned"):
            prefetch(p, i, n_bytes)
    with pytest.raises(IndexError, match="p: elements 4 to 19 of an array of 16"):
        prefetch(p, 4, 64)


def test_loads_that_are_not_allowed() -> None:
    p = Pointer(np.arange(16, dtype=u32), name="p")
    for load, width in ((load4, 16), (stream4, 16), (load2, 8), (stream2, 8), (vector4, 16), (vector2, 8)):
        with pytest.raises(ValueError, match=f"p: a load of {width} bytes at byte 4 is not aligned"):
            load(p, 1)
        with pytest.raises(IndexError, match=f"p: elements 16 to {15 + width // 4} of an array of 16"):
            load(p, 16)
        with pytest.raises(ValueError, match="is not aligned"):
            load(advance(p, 3), 2)
    with pytest.raises(IndexError, match="p: elements 12 to 15 of an array of 14"):
        load4(Pointer(np.arange(14, dtype=u32), name="p"), 12)
    q = Pointer(np.zeros(16, u32), name="q")
    for i, j, where in ((1, 0, "q"), (0, 1, "p")):
        with pytest.raises(ValueError, match=f"{where}: a load of 16 bytes at byte 4 is not aligned"):
            copy4(q, i, p, j, np.int32(1))
    with pytest.raises(ValueError, match="q: a load of 16 bytes at byte 8 is not aligned"):
        keep4(q, 2, u32(0), u32(0), u32(0), u32(0))
    with pytest.raises(IndexError, match="p: element 16 of an array of 16"):
        copy1(q, 0, p, 16, np.int32(1))
    # Arrays with other elements are read as words.
    halves = Pointer(np.arange(16, dtype=np.uint16), name="halves")
    assert [int(word) for word in load2(halves, 4)] == [0x00050004, 0x00070006]
    with pytest.raises(ValueError, match="halves: a load of 8 bytes at byte 4 is not aligned"):
        load2(halves, 2)


# --- the scalar functions --------------------------------------------------------------------------------------


@njit
def helper(x, y):
    return silu(x) * y, fma(x, y, x), float_bits(x)


@cuda.jit(device=True)
def shifted(x, y):
    return helper(lane_xor(x, np.int32(1)), y)


def scalars(x, floats, integers):
    wait_for_inputs()
    i = cuda.threadIdx.x
    a, b = x[i], x[i + 1]
    s = shifted(a, b)
    t = (
        exp(a),
        fma(a, b, F(1.0)),
        silu(a),
        half_to_float(float_to_half(a)),
        gumbel(np.uint64(5), np.int32(i), np.int32(3)),
    )
    # A sum of three, which float64 would round differently, and a chain of products.
    u = (exp(a) + exp(b) + silu(b), bits_float(float_bits(a)), silu(a) * exp(b) * b)
    for k in range(11):
        v = (t + u + s[:2] + (F(0.0),))[k]
        assert type(v) is np.float32
        floats[i * 11 + k] = v
    integers[3 * i], integers[3 * i + 1], integers[3 * i + 2] = float_to_half(a), s[2], round_product(a, b)


def test_scalar_functions() -> None:
    x = np.random.default_rng(2).standard_normal(33).astype(F) * F(3)
    floats, integers = np.zeros((32, 11), F), np.zeros((32, 3), np.int32)
    launch(scalars, (F32P, F32P, I32P), [x, floats, integers])

    @njit
    def mirror(x, floats, integers):
        for i in range(32):
            a, b, c = x[i], x[i + 1], x[i ^ 1]
            f = floats[i]
            f[0], f[1], f[2] = numerics.exp(a), numerics.fma(a, b, F(1.0)), numerics.silu(a)
            f[3] = numerics.half_to_float(numerics.float_to_half(a))
            f[4] = numerics.gumbel(np.uint64(5), np.int32(i), np.int32(3))
            f[5] = numerics.exp(a) + numerics.exp(b) + numerics.silu(b)
            f[6] = a
            f[7] = numerics.silu(a) * numerics.exp(b) * b
            f[8], f[9], f[10] = numerics.silu(c) * b, numerics.fma(c, b, c), F(0.0)
            integers[i, 0], integers[i, 1] = numerics.float_to_half(a), numerics.float_bits(c)
            integers[i, 2] = numerics.round_product(a, b)

    f, n = np.zeros_like(floats), np.zeros_like(integers)
    mirror(x, f, n)
    assert np.array_equal(floats.view(u32), f.view(u32))
    assert np.array_equal(integers, n)
    assert np.array_equal(floats[:, 3], x[:32].astype(np.float16).astype(F))


def test_scalar_functions_outside_of_kernels() -> None:
    assert type(fma(F(1.5), F(2.0), F(0.25))) is np.float32
    assert fma(F(1.5), F(2.0), F(0.25)) == 3.25
    assert type(float_bits(F(1.0))) is np.int32
    assert float_bits(F(1.0)) == 0x3F800000
    assert type(float_to_half(F(1.0))) is np.uint16
    assert half_to_float(np.uint16(0x3C00)) == 1
    assert types.float32 is f32
