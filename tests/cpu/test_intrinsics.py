"""Each vector atom against its law."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from engine.cpu import intrinsics as atoms
from engine.cpu.intrinsics import bits_law, dot_law

ANY = settings(deadline=None, max_examples=60)
bytes_ = st.integers(0, 255)


@njit
def run_dot_four(wide, w, i, stride, a, j, out):
    if wide:
        atoms.dot256_four(w, i, stride, a, j, out, 1)
    else:
        atoms.dot32_four(w, i, stride, a, j, out, 1)


@njit
def run_dot16(m, i, s, j):
    return atoms.dot16(m, i, s, j)


@njit
def run_bits(n, high, w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul):
    if n == 16:
        if high:
            atoms.bits16_high(w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul)
        else:
            atoms.bits16(w, j, src, i, shift, mask, add, mul)
    elif high:
        atoms.bits32_high(w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul)
    else:
        atoms.bits32(w, j, src, i, shift, mask, add, mul)


@njit
def run_others(w, src, shift, word, add, mul, signs):
    atoms.nibbles16_word(w, 0, src, 3, shift, word, add)
    atoms.bytes32(w, 16, src, 5)
    atoms.iq4_16(w, 48, src, 7, shift, mul)
    atoms.fp4_16(w, 64, src, 9, shift, mul)
    atoms.signed8(w, 80, src, 11, signs, mul)


@pytest.mark.parametrize("n", [32, 256])
@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(0, 9))
@ANY
def test_dot_four(n: int, seed: int, i: int, j: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.integers(-4096, 4097, 4 * 300 + 20).astype(np.int16)
    a = rng.integers(-128, 128, 300).astype(np.int8)
    out = np.zeros(6, np.int32)
    run_dot_four(n == 256, w, i, 300, a, j, out)
    expected = [dot_law(w.astype(np.int64), i + 300 * r, a.astype(np.int64), j, n) for r in range(4)]
    assert out.tolist() == [0, *expected, 0]


@given(st.integers(0, 2**32 - 1))
@ANY
def test_dot16(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m = rng.integers(-128, 128, 40).astype(np.int16)
    s = rng.integers(-2032, 2033, 40).astype(np.int16)
    assert run_dot16(m, 3, s, 7) == dot_law(m.astype(np.int64), 3, s.astype(np.int64), 7, 16)


@pytest.mark.parametrize("n", [16, 32])
@pytest.mark.parametrize("high", [False, True])
@given(
    st.lists(bytes_, min_size=100, max_size=100),
    st.integers(0, 6),
    st.sampled_from([3, 15]),
    st.integers(0, 7),
    st.integers(1, 4),
    st.integers(-32, 0),
    st.integers(-128, 127),
)
@ANY
def test_bits(
    n: int, high: bool, data: list[int], shift: int, mask: int, high_shift: int, up: int, add: int, mul: int
) -> None:
    src = np.array(data, np.uint8)
    w, expected = np.zeros(64, np.int16), np.zeros(64, np.int16)
    high_mask = 3 if high else 0
    run_bits(n, high, w, 5, src, 9, shift, mask, 50, high_shift, high_mask, up, add, mul)
    bits_law(expected, 5, src.astype(np.int64), 9, shift, mask, 50, high_shift, high_mask, up, add, mul, n)
    assert w.tolist() == expected.tolist()


@given(
    st.lists(bytes_, min_size=64, max_size=64),
    st.sampled_from([0, 4]),
    st.integers(0, 2**32 - 1),
    st.integers(-16, 0),
    st.integers(-32, 31),
    bytes_,
)
@ANY
def test_the_other_unpacking_atoms(data: list[int], shift: int, word: int, add: int, mul: int, signs: int) -> None:
    src = np.array(data, np.uint8)
    w = np.zeros(96, np.int16)
    run_others(w, src, shift, word, add, mul, signs)
    nibble = [[(data[i + t] >> shift) & 15 for t in range(16)] for i in (3, 7, 9)]
    assert w[:16].tolist() == [(q | ((word >> t) & 1) << 4) + add for t, q in enumerate(nibble[0])]
    assert w[16:48].tolist() == src[5:37].view(np.int8).tolist()
    assert w[48:64].tolist() == [atoms.IQ4_VALUES[q] * mul for q in nibble[1]]
    assert w[64:80].tolist() == [atoms.FP4_VALUES[q] * mul for q in nibble[2]]
    assert w[80:88].tolist() == [(-1 if signs >> t & 1 else 1) * data[11 + t] * mul for t in range(8)]
    assert not w[88:].any()
