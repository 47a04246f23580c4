"""engine/cpu/accept.py: how accepted and replaced drafts preserve the target's distribution, and the rules at their edges."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.cpu.accept import ACCEPT_SEED, RESAMPLE_SEED, accept_p_min, accept_ratio, probabilities, probability_of
from engine.cpu.sample import draw
from engine.numerics import uniform
from engine.sampling.sampler import Sampler, SamplerParams
from tests.tiers import examples

F = np.float32
Distribution = tuple[np.ndarray, np.ndarray]
"""ids int32 [n], probabilities float32 [n]."""

SAMPLES = 200_000
LEAST_P = 1e-4
"""A correct rule gives a smaller p-value once in 10 000 times; seeds are fixed, so a test that has passed keeps passing."""


def distribution(rng: np.random.Generator, n: int, spread: float = 1.5, n_vocab: int = 100) -> Distribution:
    """n candidates as a sampler returns them, sorted by probability."""
    values = np.sort(rng.normal(size=n) * spread)[::-1].astype(F)
    p = np.empty(n, F)
    probabilities(values, n, F(1), p, np.empty(-(-n // 256), F))
    return rng.permutation(n_vocab)[:n].astype(np.int32), p


# --- probabilities ---------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("n", [1, 2, 31, 33, 256, 257, 1000, 70_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_probabilities(n: int, temperature: float) -> None:
    """Against float64, in any order of the list."""
    values = (np.random.default_rng(n).normal(size=n) * 4).astype(F)
    p = np.full(n + 1, 7, F)
    probabilities(values, n, F(temperature), p, np.empty(-(-n // 256), F))
    exact = np.exp((values.astype(np.float64) - values.max()) / float(F(temperature)))
    exact /= exact.sum()
    # exp errs by about an ulp, and its argument by half an ulp of up to 100.
    assert np.allclose(p[:n], exact, rtol=1e-5, atol=1e-35)
    assert p[n] == 7
    assert math.isclose(p[:n].astype(np.float64).sum(), 1, rel_tol=1e-6)


def test_probabilities_of_ties_and_banned_tokens() -> None:
    values, p = np.array([2, -np.inf, 2, 2, 2], F), np.empty(5, F)
    probabilities(values, 5, F(1e-30), p, np.empty(1, F))
    assert p.tolist() == [0.25, 0, 0.25, 0.25, 0.25]


def test_probabilities_of_a_samplers_candidates() -> None:
    """The probabilities are those with which the sampler draws its tokens."""
    rng, n_vocab = np.random.default_rng(3), 60
    params = SamplerParams(temperature=0.7, top_k=12, top_p=0.95, min_p=0.02, seed=6)
    logits = (rng.normal(size=n_vocab) * 2).astype(F)
    sampler = Sampler(params, n_vocab)
    ids, values = sampler.candidates(logits)
    p = np.empty(ids.size, F)
    probabilities(values, ids.size, F(0.7), p, np.empty(1, F))
    counts = np.bincount([sampler.sample(logits, at) for at in range(20_000)], minlength=n_vocab)
    assert p_value(counts, (ids, p), n_vocab) > LEAST_P


# --- ratio: the distribution -----------------------------------------------------------------------------------


@njit
def wrong_resample(p_ids, p, n_p, q_ids, q, n_q, x, seed, position):
    """A likely mistake: min(1, p / q), but the draw that follows is from p."""
    q_x = probability_of(x, q_ids, q, n_q) if n_q > 0 else F(1.0)
    if uniform(np.uint64(seed) ^ ACCEPT_SEED, position, x) * q_x < probability_of(x, p_ids, p, n_p):
        return True, x
    return False, draw(np.log(p), p_ids, n_p, F(1.0), np.uint64(seed) ^ RESAMPLE_SEED, position)


@njit
def outcomes(rule, p_ids, p, q_ids, q, certain, first_seed, n_vocab):
    """(count of each resulting token, number of drafts kept), over positions and seeds; drafts are drawn from q as the
    sampler draws, or are always ``certain``."""
    counts = np.zeros(n_vocab, np.int64)
    kept = 0
    values = np.log(q)
    for k in range(SAMPLES):
        seed, position = np.uint64(first_seed + k // 1000), k % 1000
        x, n_q = certain, 0
        if certain < 0:
            x, n_q = draw(values, q_ids, q.size, F(1.0), seed, position), q.size
        stays, token = rule(p_ids, p, p.size, q_ids, q, n_q, x, seed, position)
        kept += stays
        counts[token] += 1
    return counts, kept


def p_value(counts: np.ndarray, target: Distribution, n_vocab: int) -> float:
    """The p-value of Pearson's chi-squared test of ``counts`` against the target; tokens expected less than 10 times form one
    class.  0 if a token occurred that the target cannot produce."""
    ids, p = target
    expected = np.zeros(n_vocab)
    expected[ids] = p.astype(np.float64)
    expected *= counts.sum() / expected.sum()
    if counts[expected == 0].any():
        return 0.0
    often = expected >= 10
    observed, expected = (np.append(x[often], x[~often].sum()) for x in (counts, expected))
    if expected[-1] < 10:
        # Still too few: merge with the last of the others.
        observed, expected = (np.append(x[:-2], x[-2:].sum()) for x in (observed, expected))
    return survival(float(((observed - expected) ** 2 / expected).sum()), expected.size - 1)


def survival(x: float, freedom: int) -> float:
    """The probability that a chi-squared variable is above x (Abramowitz and Stegun 1964, 26.4.4 and 26.4.5)."""
    if freedom == 0:
        return 1.0
    y = x / 2
    odd = freedom % 2
    terms = (
        math.exp(-y + (i - odd / 2) * math.log(y) - math.lgamma(i + 1 - odd / 2))
        for i in range(odd, freedom // 2 + odd)
    )
    return (math.erfc(math.sqrt(y)) if odd else 0.0) + (math.fsum(terms) if y > 0 else 1.0)


def test_survival() -> None:
    """Against tabulated quantiles."""
    for freedom, x, p in [
        (1, 3.841, 0.05),
        (2, 9.210, 0.01),
        (3, 16.266, 0.001),
        (10, 18.307, 0.05),
        (49, 85.351, 0.001),
    ]:
        assert math.isclose(survival(x, freedom), p, rel_tol=2e-3)


def near(rng: np.random.Generator, target: Distribution) -> Distribution:
    """A good draft: the same tokens, probabilities that differ by a few tenths, in another order."""
    ids, p = target
    q = p * np.exp(rng.normal(size=p.size) * 0.3).astype(F)
    order = np.argsort(-q)
    return ids[order], (q / q.sum())[order]


def far(rng: np.random.Generator, target: Distribution) -> Distribution:
    """A bad one: another distribution over some of the tokens and some others."""
    ids, _ = target
    kept = ids[: -(-ids.size // 2)]
    others = np.setdiff1d(np.arange(100, dtype=np.int32), ids)
    _, q = distribution(rng, ids.size)
    return rng.permutation(np.append(kept, others[: ids.size - kept.size])), q


def adverse(rng: np.random.Generator, target: Distribution) -> Distribution:
    """The worst: nearly everything on the least likely token."""
    ids, p = target
    q = np.full(ids.size, 1e-3 / ids.size, F)
    q[-1] = 1 - q[:-1].sum()
    return ids, q


def even(rng: np.random.Generator, target: Distribution) -> Distribution:
    ids, _ = target
    return ids, np.full(ids.size, 1 / ids.size, F)


DRAFTS: dict[str, Callable[[np.random.Generator, Distribution], Distribution]] = {
    "good": near,
    "bad": far,
    "adversarial": adverse,
    "even": even,
}


@pytest.mark.parametrize("draft", [*DRAFTS, "certain and likely", "certain and unlikely", "certain and impossible"])
@pytest.mark.parametrize("n", [2, 3, 8, 25, 50])
def test_ratio_preserves_the_distribution(draft: str, n: int) -> None:
    rng = np.random.default_rng([n, len(draft)])
    target = distribution(rng, n)
    ids, p = target
    certain, source = -1, target
    if draft in DRAFTS:
        source = DRAFTS[draft](rng, target)
    else:
        outside = int(np.setdiff1d(np.arange(100), ids)[0])
        certain = {"likely": int(ids[0]), "unlikely": int(ids[-1]), "impossible": outside}[draft.split()[-1]]
    counts, kept = outcomes(accept_ratio, ids, p, *source, certain, 1000 * n, 100)
    assert p_value(counts, target, 100) > LEAST_P
    # The probability that a draft is kept is the overlap of p and q (Leviathan et al. 2023, corollary 3.6).
    share = {int(i): float(x) for i, x in zip(*source, strict=True)} if certain < 0 else {certain: 1.0}
    overlap = sum(min(float(x), share.get(int(i), 0.0)) for i, x in zip(ids, p, strict=True))
    deviation = math.sqrt(overlap * (1 - overlap) / SAMPLES)
    assert abs(kept / SAMPLES - overlap) <= 5 * deviation + 1e-6


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("n", [3, 25])
def test_a_wrong_rule_is_found(draft: str, n: int) -> None:
    """The test above is powerful enough to reject a wrong rule."""
    rng = np.random.default_rng([n, len(draft)])
    target = distribution(rng, n)
    counts, _ = outcomes(wrong_resample, *target, *DRAFTS[draft](rng, target), -1, 1000 * n, 100)
    assert p_value(counts, target, 100) < LEAST_P


@njit
def two_steps(p_ids, p, q_ids, q, n_vocab):
    """The count of each pair at the positions of one draft and the token after it."""
    counts = np.zeros((n_vocab, n_vocab), np.int64)
    log_p, log_q = np.log(p), np.log(q)
    for k in range(SAMPLES):
        seed, position = np.uint64(77 + k // 1000), 2 * (k % 1000)
        x = draw(log_q, q_ids, q.size, F(1.0), seed, position)
        stays, token = accept_ratio(p_ids, p, p.size, q_ids, q, q.size, x, seed, position)
        # If the draft was kept, the row after it gives the target's own draw; if not, the next step has a draft there.
        following = draw(log_p, p_ids, p.size, F(1.0), seed, position + 1)
        if not stays:
            x = draw(log_q, q_ids, q.size, F(1.0), seed, position + 1)
            stays, following = accept_ratio(p_ids, p, p.size, q_ids, q, q.size, x, seed, position + 1)
        counts[token, following] += 1
    return counts


def test_neighbours_are_independent() -> None:
    """Draws, acceptance and the draws that replace rejected drafts are independent of each other."""
    rng = np.random.default_rng(12)
    ids, p = distribution(rng, 6, n_vocab=6)
    counts = two_steps(ids, p, *near(rng, (ids, p)), 6).reshape(-1)
    pairs = (ids[:, None] * 6 + ids).reshape(-1), np.outer(p, p).reshape(-1)
    assert p_value(counts, pairs, 36) > LEAST_P


# --- the rules at their edges ----------------------------------------------------------------------------------


def call(p: Distribution, q: Distribution, x: int, seed: int = 1, position: int = 9, n_q: int | None = None) -> Any:
    return accept_ratio(*p, p[0].size, *q, q[0].size if n_q is None else n_q, x, np.uint64(seed), position)


@given(st.integers(1, 60), st.integers(0, 2**63), st.integers(0, 2**31 - 2), st.integers(0, 2**32))
@examples(150)
def test_ratio(n: int, seed: int, position: int, choice: int) -> None:
    """A draft from the target's own distribution is kept; one it does not contain is rejected, and is not the replacement."""
    rng = np.random.default_rng(choice)
    target = distribution(rng, n)
    ids, p = target
    for x in ids[:5].tolist():
        assert call(target, target, x, seed, position) == (True, x)
        stays, token = call(target, (ids, p), x, seed, position, n_q=0)
        assert stays == (token == x) or n == 1
        # The same whatever the order of the lists, and however often it is computed.
        source = far(rng, target) if n > 1 else target
        order, other = rng.permutation(n), rng.permutation(source[0].size)
        again = call((ids[order], p[order]), (source[0][other], source[1][other]), x, seed, position)
        assert again == call(target, source, x, seed, position)
    outside = int(np.setdiff1d(np.arange(100), ids)[0])
    stays, token = call(target, (np.array([outside], np.int32), np.ones(1, F)), outside, seed, position)
    assert not stays and token in ids


def test_ratio_of_lists_as_long_as_a_vocabulary() -> None:
    rng = np.random.default_rng(5)
    target, source = distribution(rng, 50_000, n_vocab=50_000), distribution(rng, 50_000, n_vocab=50_000)
    results = [call(target, source, int(x), seed=int(x)) for x in source[0][::2500]]
    assert {stays for stays, _ in results} == {True, False}
    short = (source[0][:5], source[1][:5])
    assert all(stays or token != x for x in short[0] for stays, token in [call(target, short, int(x))])


def test_ratio_with_nothing_left() -> None:
    """Rounding may leave p below q everywhere; then the draw is from p."""
    ids, p = distribution(np.random.default_rng(6), 20)
    drawn = [call((ids, p), (ids, p * F(2)), int(ids[3]), seed) for seed in range(3000)]
    counts = np.bincount([token for stays, token in drawn if not stays], minlength=100)
    assert 1000 < counts.sum() < 2000
    assert p_value(counts, (ids, p), 100) > LEAST_P


def test_ties_go_to_the_lower_id() -> None:
    """log of a subnormal is -inf here, whatever the noise."""
    ids, p = np.array([9, 4, 7], np.int32), np.full(3, 1e-40, F)
    assert call((ids, p), (ids, np.zeros(3, F)), 50) == (False, 4)


def test_p_min() -> None:
    ids, p = np.array([4, 3, 6], np.int32), np.array([0.25, 0.7, 0.05], F)

    def kept(x: int, drawn: int, p_accept: float) -> tuple[bool, int]:
        return accept_p_min(ids, p, 3, x, drawn, F(p_accept))

    assert kept(4, 3, 0.25) == (True, 4)
    assert kept(4, 3, 0.26) == (False, 3)
    assert kept(6, 6, 0.26) == (True, 6)
    assert kept(5, 3, 1e-9) == (False, 3)
    assert kept(5, 3, 0.0) == (True, 5)
    assert kept(3, 6, 1.1) == (False, 6)
