"""engine/sampling/sampler.py and its kernels against float64 references written from the papers' definitions."""

import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.compile.jobs import CPUJob
from engine.cpu import sample as kernels
from engine.errors import EngineError, ModelError, UsageError
from engine.numerics import gumbel, log
from engine.sampling.sampler import Sampler, SamplerParams, logprobs

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

# Cuts in float32 and float64 agree if the nearest alternative is further away than this.  A running total of n
# float32 weights adds at most 256 + n / 256 of them in a row, each addition with a relative error of 2**-24, and exp
# adds 2**-23 to each: below 2e-5 of the total for the n < 10 000 of these tests.
MARGIN = 5e-5


def random_logits(n: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - np.max(x))
    return e / e.sum()


class Reference:
    """The filters in float64; ``margin`` is the smallest distance of any of its decisions from the opposite one."""

    def __init__(self, logits: np.ndarray) -> None:
        self.x = logits.astype(np.float64)
        self.ids = np.arange(logits.size)
        self.margin = math.inf

    def sort(self) -> None:
        self.ids = self.ids[np.lexsort((self.ids, -self.x[self.ids]))]

    def penalize(self, recent: list[int], repeat: float, frequency: float, presence: float) -> None:
        for token in set(recent):
            x = self.x[token]
            x = x / repeat if x > 0 else x * repeat
            self.x[token] = x - recent.count(token) * frequency - presence

    def top_k(self, k: int) -> None:
        self.sort()
        self.ids = self.ids[:k]

    def typical(self, p: float) -> None:
        x = self.x[self.ids]
        probability = softmax(x)
        content = -np.log(probability, where=probability > 0, out=np.full(x.size, -np.inf))
        entropy = np.sum(probability * np.where(probability > 0, content, 0.0))
        distance = np.abs(content - entropy)
        order = np.lexsort((np.arange(x.size), distance))
        kept = self.cut(np.cumsum(probability[order]), p)
        if kept < x.size and x[order[kept]] != x[order[kept - 1]]:
            self.margin = min(self.margin, distance[order[kept]] - distance[order[kept - 1]])
        self.ids = self.ids[order[:kept]]
        self.sort()

    def top_p(self, p: float) -> None:
        self.sort()
        self.ids = self.ids[: self.cut(np.cumsum(softmax(self.x[self.ids])), p)]

    def cut(self, total: np.ndarray, p: float) -> int:
        self.margin = min(self.margin, float(np.abs(total - p).min()))
        return min(int(np.searchsorted(total, p)) + 1, total.size)

    def min_p(self, p: float) -> None:
        x = self.x[self.ids]
        least = x.max() + math.log(p)
        self.margin = min(self.margin, float(np.abs(x - least).min()))
        self.ids = self.ids[x >= least]


def reference(logits: np.ndarray, params: SamplerParams, history: list[int]) -> Reference:
    r = Reference(logits)
    for token, bias in params.logit_bias.items():
        r.x[token] += bias
    if params.repeat_last_n:
        recent = history if params.repeat_last_n < 0 else history[-params.repeat_last_n :]
        r.penalize(recent, params.repeat_penalty, params.frequency_penalty, params.presence_penalty)
    if params.top_k > 0:
        r.top_k(params.top_k)
    if params.typical_p < 1:
        r.typical(params.typical_p)
    if params.top_p < 1:
        r.top_p(params.top_p)
    if params.min_p > 0:
        r.min_p(params.min_p)
    return r


# --- kernels ---------------------------------------------------------------------------------------------------

AWKWARD = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-45], np.float32)


def test_order_key_orders_like_floats() -> None:
    keys = [kernels.order_key(x) for x in AWKWARD]
    for x, key in zip(AWKWARD, keys, strict=True):
        assert [k < key for k in keys] == [bool(y < x) for y in AWKWARD]
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        nan = np.uint32(bits).view(np.float32)
        assert kernels.order_key(nan) > kernels.order_key(np.float32(np.inf)), hex(bits)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 4097])
def test_argmax_is_the_first_largest(n: int) -> None:
    for seed in range(20):
        x = np.round(random_logits(n, seed)).astype(np.float32)  # whole numbers: many ties
        assert kernels.argmax(x, n) == np.argmax(x)


@pytest.mark.parametrize("n", [1, 2, 50, 64, 1024, 1025, 5000])
@pytest.mark.parametrize("k", [1, 2, 40, 1024, 1025, 5000])
def test_top_k_equals_a_stable_sort(n: int, k: int) -> None:
    random = random_logits(n, n + k)
    ties = np.round(random)
    special = np.resize(AWKWARD, n)
    for x in (random, ties, special, np.sort(random), -np.sort(-random), np.zeros(n)):
        x = np.ascontiguousarray(x, np.float32)
        ids = np.arange(n, dtype=np.int32)
        keys, spare = np.empty(n, np.uint64), np.empty(n, np.uint64)
        values_out, ids_out = np.empty(n, np.float32), np.empty(n, np.int32)
        kept = kernels.top_k(x, ids, n, k, keys, spare, values_out, ids_out)
        expected = np.argsort(-x, kind="stable")[:k]
        assert kept == min(n, k)
        assert np.array_equal(ids_out[:kept], expected)
        assert np.array_equal(values_out[:kept], x[expected])


def tree_sum_reference(x: np.ndarray) -> np.float32:
    """The documented order, written with whole-array additions."""
    while True:
        rows = np.zeros((-(-x.size // 256), 8, 32), np.float32)
        rows.reshape(-1)[: x.size] = x
        lanes = rows[:, 0]
        for i in range(1, 8):
            lanes = lanes + rows[:, i]
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        x = lanes[:, 0]
        if x.size == 1:
            return x[0]


@given(st.integers(1, 70_000), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_tree_sum_has_the_documented_order(n: int, seed: int) -> None:
    x = np.random.default_rng(seed).random(n, np.float32)
    total = kernels.tree_sum(x, n, np.empty(-(-n // 256), np.float32))
    assert total == tree_sum_reference(x)
    # 8 + 5 additions per level, each with a relative error of at most 2**-24, as no term is negative.
    assert abs(float(total) - math.fsum(x.tolist())) <= 3 * 13 * 2**-24 * float(total)


@pytest.mark.parametrize("temperature", [1e-30, 0.1, 0.8, 1.0, 5.0, 1e30])
def test_draw_is_the_argmax_of_logit_and_noise(temperature: float) -> None:
    """The bound that skips hopeless entries never changes the winner."""
    t = np.float32(temperature)
    for n, position in [(1, 0), (2, 1), (50, 2), (50, 2**40), (3000, 3), (3000, 4), (3000, 5)]:
        x = random_logits(n, position % 1000)
        ids = np.random.default_rng(n).permutation(n).astype(np.int32)
        noise = np.array([gumbel(np.uint64(11), position, i) for i in ids], np.float32)
        total = x / t + noise
        expected = ids[total == total.max()].min()
        assert kernels.draw(x, ids, n, t, np.uint64(11), position) == expected


# --- filters ---------------------------------------------------------------------------------------------------

shares = st.floats(0.02, 0.98)


@given(
    n=st.sampled_from([2, 3, 10, 100, 1024, 1500, 4000]),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.3, 2.0, 6.0]),
    params=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.sampled_from([1, 5, 40, 1024, 1025, 3000]),
            "typical_p": shares,
            "top_p": shares,
            "min_p": st.floats(1e-4, 0.9),
        },
    ),
    edits=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_filters_equal_the_float64_reference(
    n: int, seed: int, spread: float, params: dict[str, Any], edits: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(n, seed, spread)
    if edits:
        params = params | {
            "logit_bias": {int(i): float(rng.normal()) for i in rng.integers(0, n, 3)},
            "repeat_penalty": 1.3,
            "frequency_penalty": 0.2,
            "presence_penalty": -0.1,
            "repeat_last_n": 20,
        }
    history = rng.integers(0, n, 50).tolist()
    p = SamplerParams(**(OFF | params), seed=1)
    r = reference(logits, p, history)
    assume(r.margin > MARGIN)
    ids, values = Sampler(p, n).candidates(logits, history)
    assert np.array_equal(ids, r.ids)
    assert np.allclose(values, r.x[r.ids], rtol=1e-6, atol=1e-5)


def test_filters_at_ties() -> None:
    """Equal logits: the lower ids stay."""
    logits = np.array([0, 2, 2, 1, 2, 1, 0, 2], np.float32)
    assert Sampler(SamplerParams(**OFF | {"top_k": 3}), 8).candidates(logits)[0].tolist() == [1, 2, 4]
    # Softmax: 4 tokens of 0.1998, 2 of 0.0735, 2 of 0.0270.
    assert Sampler(SamplerParams(**OFF | {"top_p": 0.39}), 8).candidates(logits)[0].tolist() == [1, 2]
    assert Sampler(SamplerParams(**OFF | {"top_p": 0.85}), 8).candidates(logits)[0].tolist() == [1, 2, 4, 7, 3]
    # Their mean logit is 1.75, so those of 2 are nearest, then those of 1.
    assert Sampler(SamplerParams(**OFF | {"typical_p": 0.5}), 8).candidates(logits)[0].tolist() == [1, 2, 4]
    assert Sampler(SamplerParams(**OFF | {"min_p": 0.3}), 8).candidates(logits)[0].tolist() == [1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("n", [4, 1024, 2048, 4096])
def test_shares_that_a_prefix_reaches_exactly(n: int) -> None:
    """Sums of equal weights are exact: top-p stops where its share is reached, typical sampling where it is exceeded."""
    logits = np.zeros(n, np.float32)
    for quarter in (1, 2, 3):
        kept = {
            name: Sampler(SamplerParams(**OFF | {name: quarter / 4}), n).candidates(logits)[0].tolist()
            for name in ("top_p", "typical_p")
        }
        assert kept["top_p"] == list(range(n * quarter // 4))
        assert kept["typical_p"] == list(range(n * quarter // 4 + 1))


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5])
def test_min_p_keeps_what_is_at_its_bound(share: float) -> None:
    bound = np.float32(log(np.float32(share)))
    logits = np.array([0.0, bound, np.nextafter(bound, np.float32(-9)), -30.0], np.float32)
    params = SamplerParams(**(OFF | {"min_p": share, "seed": 1}))
    assert Sampler(params, 4).candidates(logits)[0].tolist() == [0, 1]


def test_typical_may_drop_the_most_probable() -> None:
    """One token of 0.3 among 1000 of 0.0007: the entropy is 5.4, the content of the first 1.2, of the rest 7.3."""
    logits = np.zeros(1000, np.float32)
    logits[500] = math.log(0.3 / 0.7 * 999)
    ids, _ = Sampler(SamplerParams(**OFF | {"typical_p": 0.5}), 1000).candidates(logits)
    assert 500 not in ids
    assert ids.tolist() == [i for i in range(1000) if i != 500][: ids.size]


def test_a_share_of_0_keeps_one_and_1_keeps_all() -> None:
    logits = random_logits(3000, 5)
    best = int(np.argmax(logits))
    assert Sampler(SamplerParams(**OFF | {"top_p": 0.0}), 3000).candidates(logits)[0].tolist() == [best]
    assert Sampler(SamplerParams(**OFF | {"min_p": 1.0}), 3000).candidates(logits)[0].tolist() == [best]
    assert Sampler(SamplerParams(**OFF | {"typical_p": 0.0}), 3000).candidates(logits)[0].size == 1
    assert Sampler(SamplerParams(**OFF), 3000).candidates(logits)[0].tolist() == list(range(3000))


def test_nucleus_past_the_first_1024() -> None:
    """A flat vocabulary, where the nucleus is most of it: the same set whether or not top_k sorted it first."""
    logits = random_logits(5000, 8, spread=0.1)
    whole = Sampler(SamplerParams(**OFF | {"top_p": 0.9, "seed": 1}), 5000).candidates(logits)[0]
    r = reference(logits, SamplerParams(**OFF | {"top_p": 0.9}), [])
    assert r.margin > 2e-5
    assert whole.size > 4000
    assert np.array_equal(whole, r.ids)
    again = Sampler(SamplerParams(**OFF | {"top_p": 0.9, "top_k": 5000, "seed": 1}), 5000).candidates(logits)[0]
    assert np.array_equal(whole, again)


def test_nucleus_ignores_a_hopeless_tail() -> None:
    """2000 equal tokens hold all the probability, 3000 more almost none: the tail is never needed."""
    logits = np.full(5000, -60, np.float32)
    logits[1::2] = np.where(np.arange(2500) < 2000, 0, -60)
    ids, _ = Sampler(SamplerParams(**OFF | {"top_p": 0.75025}), 5000).candidates(logits)
    assert ids.tolist() == list(range(1, 3003, 2))


# --- edits of the logits ---------------------------------------------------------------------------------------


def test_penalties_equal_the_reference() -> None:
    logits = random_logits(50, 1)
    history = [3, 3, 3, 7, 9, 9, 40] + [0] * 10
    for last_n in (0, 1, 11, 12, 17, 64, -1):
        p = SamplerParams(
            **OFF, repeat_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7, repeat_last_n=last_n, seed=1
        )
        ids, values = Sampler(p, 50).candidates(logits, history)
        assert ids.tolist() == list(range(50))
        assert np.allclose(values, reference(logits, p, history).x, rtol=1e-6, atol=1e-6)
        window = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
        assert {int(i) for i in np.flatnonzero(values != logits)} == set(window)


@pytest.mark.parametrize("value", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["repeat_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_by_itself(name: str, value: float) -> None:
    logits = random_logits(50, 1)
    options: dict[str, Any] = OFF | {name: value, "seed": 1}
    p = SamplerParams(**options)
    values = Sampler(p, 50).candidates(logits, [7])[1]
    assert np.allclose(values, reference(logits, p, [7]).x, rtol=1e-6, atol=1e-6)
    assert (values[7] == logits[7]) == (p.repeat_penalty == 1 and p.presence_penalty == p.frequency_penalty == 0)


def test_what_is_switched_off_costs_nothing() -> None:
    """The history is not even converted to an array."""
    for params in (SamplerParams(), SamplerParams(repeat_last_n=-1), SamplerParams(dry_penalty_last_n=-1)):
        assert not (params.penalizes or params.penalizes_repetitions or params.excludes_top_choices)
    penalties: dict[str, Any] = {"repeat_penalty": 1.1, "dry_multiplier": 0.8}
    on, off = SamplerParams(**penalties), SamplerParams(**penalties, repeat_last_n=0, dry_penalty_last_n=0)
    assert (on.penalizes, on.penalizes_repetitions, off.penalizes, off.penalizes_repetitions) == (
        True,
        True,
        False,
        False,
    )


def test_the_order_of_the_history_does_not_matter() -> None:
    logits = random_logits(200, 2)
    p = SamplerParams(**OFF, repeat_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.2, seed=3)
    history = np.random.default_rng(0).integers(0, 200, 60)
    expected = Sampler(p, 200).candidates(logits, history.tolist())[1]
    for seed in range(5):
        shuffled = np.random.default_rng(seed).permutation(history)
        assert np.array_equal(Sampler(p, 200).candidates(logits, shuffled.tolist())[1], expected)


def test_bias_comes_before_penalties() -> None:
    """The behaviour of llama.cpp: a bias that makes a logit positive makes the repeat penalty divide it."""
    p = SamplerParams(**OFF, logit_bias={0: 5.0}, repeat_penalty=2.0, seed=1)
    assert Sampler(p, 2).candidates(np.array([-1, 0], np.float32), [0])[1].tolist() == [2.0, 0.0]


def test_bias_forces_and_bans() -> None:
    logits = random_logits(100, 4)
    best = int(np.argmax(logits))
    for temperature in (0.0, 1.0):
        forced = Sampler(SamplerParams(temperature=temperature, logit_bias={17: 100.0}, seed=1), 100)
        assert all(forced.sample(logits, i) == 17 for i in range(20))
        banned = Sampler(SamplerParams(temperature=temperature, logit_bias={best: -math.inf}, seed=1), 100)
        assert all(banned.sample(logits, i) != best for i in range(200))


def test_logits_and_history_are_left_alone() -> None:
    logits = random_logits(5000, 6)
    history = list(range(100))
    before = logits.copy()
    p = SamplerParams(logit_bias={3: 1.0}, repeat_penalty=1.1, typical_p=0.9, seed=1)
    for params in (p, SamplerParams(seed=1), SamplerParams(**OFF, seed=1)):
        Sampler(params, 5000).sample(logits, 0, history)
        assert np.array_equal(logits, before)
        assert history == list(range(100))


# --- the draw --------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probability: np.ndarray) -> tuple[float, float]:
    """(statistic, bound): the mean of the statistic plus 5 of its standard deviations."""
    expected = counts.sum() * probability
    assert expected.min() >= 5
    freedom = counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum()), freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_positions_sample_the_softmax(temperature: float) -> None:
    logits = random_logits(12, 7, spread=1.0)
    sampler = Sampler(SamplerParams(**OFF, temperature=temperature, seed=42), 12)
    tokens = np.array([sampler.sample(logits, i) for i in range(20_000)])
    statistic, bound = chi_square(np.bincount(tokens, minlength=12), softmax(logits / temperature))
    assert statistic < bound
    # Neighbouring positions are independent: so are pairs of tokens, here of the four most probable.
    four = np.argsort(-logits)[:4]
    share = softmax(logits / temperature)[four]
    pairs = np.array([((tokens[:-1:2] == a) & (tokens[1::2] == b)).sum() for a in four for b in four])
    statistic, bound = chi_square(
        np.append(pairs, 10_000 - pairs.sum()), np.append(np.outer(share, share), 1 - share.sum() ** 2)
    )
    assert statistic < bound


def test_seeds_sample_the_softmax() -> None:
    logits = random_logits(10, 9, spread=1.0)
    ids = np.arange(10, dtype=np.int32)
    tokens = [kernels.draw(logits, ids, 10, np.float32(1), np.uint64(seed), 5) for seed in range(20_000)]
    statistic, bound = chi_square(np.bincount(tokens, minlength=10), softmax(logits))
    assert statistic < bound


def test_filtered_tokens_sample_the_renormalized_softmax() -> None:
    logits = random_logits(2000, 10)
    p = SamplerParams(top_k=20, top_p=0.9, min_p=0.05, temperature=0.7, seed=5)
    sampler = Sampler(p, 2000)
    ids, values = sampler.candidates(logits)
    tokens = np.array([sampler.sample(logits, i) for i in range(20_000)])
    assert set(tokens.tolist()) <= set(ids.tolist())
    counts = np.array([(tokens == i).sum() for i in ids])
    statistic, bound = chi_square(counts, softmax(values / 0.7))
    assert statistic < bound


def test_a_token_depends_on_seed_and_position_only() -> None:
    logits = random_logits(500, 11, spread=1.0)
    p = SamplerParams(seed=9, temperature=1.5)
    sampler = Sampler(p, 500)
    tokens = [sampler.sample(logits, i) for i in range(100)]
    assert [sampler.sample(logits, i) for i in reversed(range(100))] == tokens[::-1]  # no state between calls
    assert [Sampler(p, 500).sample(logits, i) for i in range(100)] == tokens
    assert [sampler.sample(logits, i + 1) for i in range(100)] != tokens
    assert [Sampler(SamplerParams(seed=10, temperature=1.5), 500).sample(logits, i) for i in range(100)] != tokens
    assert len(set(tokens)) > 5


def test_work_arrays_carry_nothing_over() -> None:
    """Calls with other logits and histories in between change nothing."""
    p = SamplerParams(
        typical_p=0.95,
        repeat_penalty=1.2,
        frequency_penalty=0.1,
        logit_bias={5: 2.0},
        temperature=1.2,
        top_k=2000,
        seed=4,
    )
    rows = [random_logits(3000, i, spread=0.5 + i % 3) for i in range(10)]
    histories = [np.random.default_rng(i).integers(0, 3000, i * 20).tolist() for i in range(10)]
    fresh = [Sampler(p, 3000).sample(rows[i], i, histories[i]) for i in range(10)]
    shared = Sampler(p, 3000)
    assert [shared.sample(rows[i], i, histories[i]) for i in range(10)] == fresh


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.sampled_from([1, 7, 64, 3000]))
@settings(max_examples=50, deadline=None)
def test_top_k_1_is_greedy_for_every_seed(seed: int, position: int, n: int) -> None:
    logits = random_logits(n, seed % 1000)
    greedy = Sampler(SamplerParams(temperature=0.0), n).sample(logits, position)
    assert greedy == int(np.argmax(logits))
    assert Sampler(SamplerParams(top_k=1, seed=seed, temperature=2.0), n).sample(logits, position) == greedy


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([1, -0.0, 3, 3, 0.0, 3], np.float32)
    for temperature in (0.0, -1.0):
        assert Sampler(SamplerParams(temperature=temperature), 6).sample(logits, 0) == 2
    zeros = np.array([-1, -0.0, 0.0], np.float32)
    assert Sampler(SamplerParams(temperature=0), 3).sample(zeros, 0) == 1
    ids, values = Sampler(SamplerParams(temperature=0, logit_bias={4: 9.0}), 6).candidates(logits)
    assert (ids.tolist(), values.tolist()) == ([4], [9.0])


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform() -> None:
    logits = random_logits(8, 3) * np.float32(10)
    cold = Sampler(SamplerParams(**OFF, temperature=1e-40, seed=1), 8)
    assert {cold.sample(logits, i) for i in range(100)} == {int(np.argmax(logits))}
    hot = Sampler(SamplerParams(**OFF, temperature=1e30, seed=1), 8)
    tokens = [hot.sample(logits, i) for i in range(8000)]
    statistic, bound = chi_square(np.bincount(tokens, minlength=8), np.full(8, 1 / 8))
    assert statistic < bound


def test_random_seeds_can_be_replayed() -> None:
    logits = random_logits(100, 12)
    samplers = [Sampler(SamplerParams(), 100) for _ in range(4)]
    assert len({s.seed for s in samplers}) == 4
    for s in samplers:
        assert 0 <= s.seed < 2**32
        replay = Sampler(SamplerParams(seed=s.seed), 100)
        assert [s.sample(logits, i) for i in range(20)] == [replay.sample(logits, i) for i in range(20)]
    assert Sampler(SamplerParams(seed=2**64 - 1), 100).seed == 2**64 - 1


def test_warm_up_and_a_vocabulary_of_one() -> None:
    for params in (
        SamplerParams(),
        SamplerParams(temperature=0),
        SamplerParams(**OFF),
        SamplerParams(typical_p=0.5),
    ):
        for n in (1, 300):
            Sampler(params, n).warm_up()
        assert Sampler(params, 1).sample(np.array([-5], np.float32), 3) == 0


# --- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 100, 5000, 262_144])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_logprobs_equal_float64(n: int, spread: float) -> None:
    logits = random_logits(n, n, spread)
    expected = logits.astype(np.float64) - logits.max()
    expected = expected - math.log(np.exp(expected).sum())
    ids = np.random.default_rng(1).integers(0, n, 20).tolist()
    values, top_ids, top_values = logprobs(logits, ids, 7)
    order = np.argsort(-logits, kind="stable")[:7]
    assert (values.dtype, top_ids.dtype, top_values.dtype) == (np.float32, np.int32, np.float32)
    assert np.array_equal(top_ids, order)
    # One rounding of each of two differences below 100, and the logarithm of a total known to 40 * 2**-24.
    assert np.abs(values - expected[ids]).max() <= 1.2e-5
    assert np.abs(top_values - expected[order]).max() <= 1.2e-5
    assert np.array_equal(logprobs(logits, top_ids).values, top_values)


def test_logprobs_of_extreme_rows() -> None:
    row = np.array([0, -np.inf, -200, 0], np.float32)
    values, top_ids, _ = logprobs(row, range(4), 10)
    assert values.tolist() == pytest.approx([-math.log(2), -math.inf, -200 - math.log(2), -math.log(2)], abs=2e-5)
    assert top_ids.tolist() == [0, 3, 2, 1]
    assert logprobs(row).values.size == logprobs(row).top_ids.size == 0
    one = np.array([-50, 1000], np.float32)
    assert logprobs(one, [1]).values.tolist() == [0.0]


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplerParams(), SamplerParams(temperature=0), SamplerParams(**OFF)])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001])
def test_nan_logits(params: SamplerParams, bits: int) -> None:
    for place in (0, 1, 63, 64, 100, 2999):
        logits = random_logits(3000, 1)
        logits.view(np.uint32)[place] = bits
        with pytest.raises(ModelError, match="the model produced NaN"):
            Sampler(params, 3000).sample(logits, 0)
        with pytest.raises(ModelError, match="the model produced NaN"):
            logprobs(logits)


def test_infinite_logits() -> None:
    logits = random_logits(100, 1)
    logits[50] = np.inf
    for params in (SamplerParams(), SamplerParams(temperature=0), SamplerParams(**OFF)):
        with pytest.raises(ModelError, match="the model produced infinite"):
            Sampler(params, 100).sample(logits, 0)
    logits[50] = -np.inf
    for params in (SamplerParams(seed=1, typical_p=0.9), SamplerParams(temperature=0), SamplerParams(**OFF, seed=1)):
        assert all(Sampler(params, 100).sample(logits, i) != 50 for i in range(50))
    # Also where a bias could have banned what is left: the model's logits were infinite before it.
    logits[:] = -np.inf
    for params in (SamplerParams(), SamplerParams(temperature=0, logit_bias={3: -math.inf})):
        with pytest.raises(ModelError, match="the model produced infinite"):
            Sampler(params, 100).sample(logits, 0)
    banned = SamplerParams(logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(UsageError, match="bans every token"):
        Sampler(banned, 2).sample(np.zeros(2, np.float32), 0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", math.nan, "temperature must be a finite number, not nan"),
        ("temperature", math.inf, "temperature must be a finite number, not inf"),
        ("temperature", 1e39, "temperature must be a finite number, not 1e+39"),
        ("temperature", "0.8", "temperature must be a number, not '0.8'"),
        ("temperature", None, "temperature must be a number, not None"),
        ("top_k", 4.5, "top_k must be a whole number, not 4.5"),
        ("top_k", True, "top_k must be a whole number, not True"),
        ("top_p", -0.1, "top_p must be 0 or more (1 switches it off), not -0.1"),
        ("typical_p", -1, "typical_p must be 0 or more (1 switches it off), not -1.0"),
        ("min_p", 1.5, "min_p must be at most 1 (0 switches it off), not 1.5"),
        ("repeat_penalty", 0, "repeat_penalty must be at least 1e-06 (1 switches it off), not 0.0"),
        ("repeat_penalty", math.nan, "repeat_penalty must be a finite number, not nan"),
        ("repeat_last_n", -2, "repeat_last_n must be -1 (all), 0 (none) or more, not -2"),
        ("presence_penalty", math.inf, "presence_penalty must be a finite number, not inf"),
        ("frequency_penalty", [], "frequency_penalty must be a number, not an empty list"),
        ("seed", -2, "seed must be -1 (random) or 0 to 2**64 - 1, not -2"),
        ("repeat_penalty", 1e-40, "repeat_penalty must be at least 1e-06 (1 switches it off), not 1e-40"),
        ("frequency_penalty", -3e38, "frequency_penalty must be at least -1e+30 (0 switches it off), not -3e+38"),
        ("presence_penalty", "1" * 10**6, "presence_penalty must be a number, not a text of 1000000 characters"),
        ("min_p", 10**5000, "min_p must be a number, not a whole number of 16610 bits"),
        (
            "dry_allowed_length",
            -(10**5000),
            "dry_allowed_length must be 0 or more, not a negative number of 16610 bits",
        ),
        ("logit_bias", {3: 3e38}, "logit_bias of token 3 must be at most 1e+30, not 3e+38"),
        (
            "logits_processors",
            ["x" * 99],
            "logits_processors must be a list of functions; a text of 99 characters is not one",
        ),
        ("seed", 2**64, f"seed must be -1 (random) or 0 to 2**64 - 1, not {2**64}"),
        ("logit_bias", [(1, 2.0)], "logit_bias must map token ids to numbers, not a list of tuple"),
        ("logit_bias", {"a": 1.0}, "a token id in logit_bias must be a whole number, not 'a'"),
        ("logit_bias", {-1: 1.0}, "a token id in logit_bias must be 0 or more, not -1"),
        ("logit_bias", {3: math.nan}, "logit_bias of token 3 must be a finite number, not nan"),
        ("logit_bias", {3: math.inf}, "logit_bias of token 3 must be a finite number, not inf"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_params_are_checked(field: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(message)}\.$"):
        SamplerParams(**{field: value})


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_what_is_not_permitted_cannot_be_chosen(n: int) -> None:
    rng = np.random.default_rng(n)
    logits = rng.normal(size=n).astype(np.float32)
    kept = rng.random(n) < 0.5
    kept[: n // 3] = True
    mask = np.packbits(np.pad(kept, (0, -n % 32 + 32)), bitorder="little").view(np.uint32)
    found = logits.copy()
    kernels.permit(found, mask)
    assert np.array_equal(found, np.where(kept, logits, -np.inf).astype(np.float32))


def test_the_most_extreme_changes_leave_logits_finite() -> None:
    """So infinite logits are always the model's."""
    extreme: dict[str, Any] = {"repeat_penalty": 1e-6, "presence_penalty": -1e30, "frequency_penalty": -1e30}
    params = SamplerParams(logit_bias={0: 1e30}, repeat_last_n=-1, temperature=0, **extreme)
    assert Sampler(params, 2).sample(np.array([1e4, 0], np.float32), 100, [0] * 100) == 0


@pytest.mark.parametrize("name", ["dry_allowed_length", "dry_penalty_last_n", "repeat_last_n", "top_k"])
def test_numbers_beyond_64_bits_mean_all_or_never(name: str) -> None:
    history = [1, 2, 3, 1, 2]
    given: dict[str, Any] = {"repeat_penalty": 1.5, "dry_multiplier": 9.0, "seed": 1}
    expected = Sampler(SamplerParams(**given | {name: 100}), 10).candidates(random_logits(10, 1), history)
    for huge in (2**63, 2**70):
        found = Sampler(SamplerParams(**given | {name: huge}), 10).candidates(random_logits(10, 1), history)
        assert np.array_equal(found, expected)


def test_defaults_are_those_of_llama_cpp() -> None:
    filters = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0}
    penalties = {"repeat_penalty": 1.0, "repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    dry = {
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_breakers": (),
    }
    xtc = {"xtc_probability": 0.0, "xtc_threshold": 0.1}
    expected: dict[str, Any] = filters | penalties | dry | xtc | {"logit_bias": {}, "logits_processors": (), "seed": -1}
    assert vars(SamplerParams()) == expected


def test_params_accept_what_switches_off() -> None:
    seed: Any = np.int64(3)
    p = SamplerParams(temperature=-1, top_k=-5, top_p=2, min_p=-1, typical_p=7, repeat_last_n=0, seed=seed)
    assert p.greedy and not p.penalizes
    assert asdict(p)["seed"] == 3 and isinstance(p.temperature, float) and type(p.seed) is int
    bias = {1: 2}
    q = SamplerParams(logit_bias=bias)
    bias[5] = 6
    assert q.logit_bias == {1: 2.0}


def test_arguments_are_checked() -> None:
    logits = np.zeros(10, np.float32)
    sampler = Sampler(SamplerParams(repeat_penalty=1.1), 10)
    for bad in (np.zeros(9, np.float32), np.zeros((1, 10), np.float32), np.zeros(10), [0.0] * 10):
        with pytest.raises(UsageError, match=r"one row of float32 \[10\], not "):
            sampler.sample(bad, 0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="position of a token must be 0 or more, not -1"):
        sampler.sample(logits, -1)
    for token in (-1, 10):
        with pytest.raises(UsageError, match=f"the history contains token {token}, but the vocabulary ends at 9"):
            sampler.sample(logits, 0, [1, token])
    with pytest.raises(UsageError, match="logit_bias names token 10, but the vocabulary ends at 9"):
        Sampler(SamplerParams(logit_bias={10: 1.0}), 10)
    for huge in (2**63, 2**70, 10**5000):
        with pytest.raises(UsageError, match="logit_bias names token .*, but the vocabulary ends at 9"):
            Sampler(SamplerParams(logit_bias={huge: 1.0}), 10)
    with pytest.raises(UsageError, match="at least 1 token, not 0"):
        Sampler(SamplerParams(), 0)
    with pytest.raises(UsageError, match="token ids must be 0 to 9"):
        logprobs(logits, [10])
    with pytest.raises(UsageError, match="0 or more, not -1"):
        logprobs(logits, [], -1)
    with pytest.raises(EngineError, match=r"not float64 \[3\]"):
        logprobs(np.zeros(3))  # type: ignore[arg-type]
    # Views with a stride are rows, too.
    strided = random_logits(20, 1)[::2]
    assert Sampler(SamplerParams(temperature=0), 10).sample(strided, 0) == int(np.argmax(strided))


def test_kernels_are_listed_after_logits_that_are_not_finite() -> None:
    """What an answer leaves in the arrays that the samplers of a thread share is not taken for logits."""
    sampler = Sampler(SamplerParams(temperature=0.8, top_k=40, seed=1), 77)
    jobs = sampler.jobs()
    assert {"top_k", "min_p", "draw"} <= {job.name for job in jobs if isinstance(job, CPUJob)}
    with pytest.raises(ModelError, match="NaN logits"):
        sampler.sample(np.full(77, np.nan, np.float32), 0)
    assert sampler.jobs() == jobs
