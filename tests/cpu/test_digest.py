"""The digest of a row of logits, against its definition in Python's integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.digest import digest
from engine.cpu.sample import pack
from engine.sampling.row_digest import row_digest

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def expected(logits: np.ndarray) -> str:
    low = high = 0
    for token, bits in enumerate(logits.view(np.uint32).tolist()):
        word = mix((token * 2**32 + bits + GAMMA) & MASK)
        low, high = (low + word) & MASK, (high + mix((word + GAMMA) & MASK)) & MASK
    return (high << 64 | low).to_bytes(16, "little").hex()


rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=40)


@given(rows)
def test_it_is_that_of_its_definition(values: list[float]) -> None:
    logits = np.array(values, np.float32)
    found = row_digest(logits)
    assert found.digest == expected(logits)
    order = sorted(range(len(values)), key=lambda i: (-logits[i], i))
    assert found.tokens == tuple(order[:2])
    assert found.values == tuple(logits[order[:2]].tolist())


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, np.nan, np.inf, -np.inf]), min_size=2, max_size=300))
def test_the_two_largest_are_those_of_the_sampler(values: list[float]) -> None:
    """Ties, both zeros, and what is not finite; more logits than are compared at once."""
    logits = np.array(values, np.float32)
    keys = sorted(range(len(values)), key=lambda i: -pack(logits[i], i))
    assert row_digest(logits).tokens == tuple(keys[:2])
    assert row_digest(logits).digest == expected(logits)


@given(rows, st.data())
def test_every_bit_of_one_logit_shows(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    other = logits.copy()
    at, bit = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, 31))
    other.view(np.uint32)[at] ^= np.uint32(1 << bit)
    # Both sums differ, for the mixing is a bijection.
    assert all(a != b for a, b in zip(digest(logits)[:2], digest(other)[:2], strict=True))


@given(rows, st.data())
def test_logits_that_change_places_show(values: list[float], data: st.DataObject) -> None:
    logits = np.array(values, np.float32)
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    other = logits.copy()
    other[[i, j]] = other[[j, i]]
    same = logits.tobytes() == other.tobytes()
    assert (row_digest(logits).digest == row_digest(other).digest) == same


def test_minus_infinity_and_zeros_of_both_signs_count() -> None:
    logits = np.array([-np.inf, 0.0, -0.0, -np.inf], np.float32)
    assert row_digest(logits).digest == expected(logits)
    assert row_digest(logits).tokens == (1, 2)
    assert row_digest(-logits[1:3]).digest != row_digest(logits[1:3]).digest
