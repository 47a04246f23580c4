"""XTC against its description in float64, and the frequencies that follow from it."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from tests.tiers import examples

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - np.max(x))
    return e / e.sum()


def candidates(logits: np.ndarray, position: int = 0, **options: Any) -> list[int]:
    params = SamplerParams(**OFF | {"xtc_probability": 1.0} | options)
    return Sampler(params, logits.size).candidates(logits, position=position)[0].tolist()


@given(
    st.integers(2, 400),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3, 0.5]),
    st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 30, "typical_p": 0.8}]),
)
@examples(500, 100)
def test_of_the_probable_tokens_the_least_probable_stays(
    n: int, seed: int, spread: float, threshold: float, filters: dict[str, Any]
) -> None:
    logits = (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)
    before, values = Sampler(SamplerParams(**OFF | filters), n).candidates(logits)
    probability = softmax(values)
    # A weight and the total have relative errors below 2e-6 in float32.
    assume(np.abs(probability / max(threshold, 1e-9) - 1).min() > 1e-5)
    probable = np.flatnonzero(probability >= threshold)
    excluded = set(probable.tolist()) - ({probable[np.argmin(probability[probable])]} if probable.size else set())
    expected = [int(token) for i, token in enumerate(before) if i not in excluded]
    assert candidates(logits, **filters, xtc_threshold=threshold) == expected


def test_ties_bans_and_single_candidates() -> None:
    assert candidates(np.array([1, 1, 1, 1, -9], np.float32)) == [3, 4]
    assert candidates(np.array([0, 0], np.float32), xtc_threshold=0.5) == [1]
    assert candidates(np.array([0, 0], np.float32), xtc_threshold=0.51) == [0, 1]
    # A banned token has no probability, so it is never the one that stays.
    assert candidates(np.array([2, 1, -np.inf], np.float32), xtc_threshold=0.0) == [1, 2]
    assert candidates(np.array([9, 1, 2], np.float32)) == [0, 1, 2]
    assert candidates(np.array([2, 1, 0], np.float32), top_k=1) == [0]


def test_the_threshold_is_for_probabilities_before_the_temperature() -> None:
    logits = np.array([2, 1, 0], np.float32)  # 0.665, 0.245, 0.090
    for temperature in (0.1, 1.0, 10.0):
        assert candidates(logits, xtc_threshold=0.2, temperature=temperature) == [1, 2]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(2, 50))
@examples(100, 20)
def test_switched_off_it_changes_no_bit(seed: int, position: int, n: int) -> None:
    logits = np.random.default_rng(n).normal(size=n).astype(np.float32)
    plain = Sampler(SamplerParams(seed=seed), n)
    for probability, threshold in ((0.0, 0.0), (1.0, 0.6)):
        sampler = Sampler(SamplerParams(xtc_probability=probability, xtc_threshold=threshold, seed=seed), n)
        assert sampler.sample(logits, position) == plain.sample(logits, position)
        for one, other in zip(sampler.candidates(logits), plain.candidates(logits), strict=True):
            assert np.array_equal(one, other)
    greedy = Sampler(SamplerParams(temperature=0, xtc_probability=1.0, seed=seed), n)
    assert greedy.sample(logits, position) == int(np.argmax(logits))


def within(count: int, n: int, p: float) -> bool:
    """Whether a count of n trials is within 5 standard deviations of its mean."""
    return abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9])
def test_how_often_it_strikes(probability: float) -> None:
    """Over positions and over seeds, and independently of the draw that follows."""
    logits = np.zeros(2, np.float32)
    n = 10_000
    params = SamplerParams(**OFF, temperature=1.0, xtc_probability=probability)
    sampler = Sampler(params, 2)
    strikes = [sampler.candidates(logits, position=i)[0].size == 1 for i in range(n)]
    assert within(sum(strikes), n, probability)
    pairs = sum(a and b for a, b in zip(strikes[::2], strikes[1::2], strict=True))
    assert within(pairs, n // 2, probability**2)
    drawn = [sampler.sample(logits, i) for i in range(n)]
    assert within(drawn.count(0), n, (1 - probability) / 2)
    assert all(token == 1 for token, struck in zip(drawn, strikes, strict=True) if struck)
    over_seeds = 0
    for seed in range(n):
        sampler.seed = seed
        over_seeds += sampler.candidates(logits, position=7)[0].size == 1
    assert within(over_seeds, n, probability)


def test_where_it_strikes_depends_on_seed_and_position_only() -> None:
    rng = np.random.default_rng(3)
    params = SamplerParams(**OFF, xtc_probability=0.5)
    struck = []
    for n in (2, 5, 3):
        sampler = Sampler(params, n)
        logits = np.zeros(n, np.float32)
        found = {int(i): sampler.candidates(logits, position=int(i))[0].size < n for i in rng.permutation(100)}
        struck.append([found[i] for i in range(100)])
    assert struck[0] == struck[1] == struck[2]
    # By default a candidate is for the position after the history.
    assert [sampler.candidates(logits, [0] * i)[0].size < 3 for i in range(100)] == struck[0]
    other = Sampler(SamplerParams(**OFF | {"seed": 2}, xtc_probability=0.5), 3)
    assert [other.candidates(logits, position=i)[0].size < 3 for i in range(100)] != struck[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xtc_probability": -0.1}, r"xtc_probability must be 0 \(off\) to 1, not -0.1"),
        ({"xtc_probability": 1.1}, r"xtc_probability must be 0 \(off\) to 1, not 1.1"),
        ({"xtc_probability": "1"}, "xtc_probability must be a number, not '1'"),
        ({"xtc_threshold": -0.1}, r"xtc_threshold must be 0 to 1 \(above 0.5 switches XTC off\), not -0.1"),
        ({"xtc_threshold": math.nan}, "xtc_threshold must be a finite number, not nan"),
    ],
)
def test_parameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"^{message}\.$"):
        SamplerParams(**options)
