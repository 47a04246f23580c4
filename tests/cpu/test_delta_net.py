"""The gated delta rule against a transcription of its law, against float64, and by all paths."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrays import Batch
from engine.cache.recurrent import RecurrentCache, RecurrentCacheSpec
from engine.cache.types import F32
from engine.cpu import delta_net
from engine.ops.delta_net import DeltaNet
from engine.verify.layout import delta_gates
from tests.batches import one_sequence
from tests.mirror import Mirror as Backend
from tests.pages import arrays_of, layer_of, no_pages
from tests.tiers import examples

F = np.float32
EPS = 1e-6
BOUND = 2e-5
"""Errors in standard deviations: at most 6.2e-6 was measured.  A state is a sum over all tokens before it."""

NETS = [(2, 6, 32, 4), (1, 3, 64, 3), (3, 3, 96, 2), (2, 4, 128, 5)]


def random_net(n_k: int, n_v: int, d: int, n_conv: int, grouped: bool = False, seed: int = 0) -> DeltaNet:
    rng = np.random.default_rng(seed)
    channels = (2 * n_k + n_v) * d
    return DeltaNet(
        n_k,
        n_v,
        d,
        n_conv,
        EPS,
        conv1d=(rng.standard_normal((channels, n_conv)) * n_conv**-0.5).astype(F),
        a=-np.exp(rng.uniform(-2, 2, n_v)).astype(F),
        dt=rng.uniform(-5, -2, n_v).astype(F),
        norm=rng.uniform(0.5, 1.5, d).astype(F),
        grouped=grouped,
    )


@dataclass
class Inputs:
    """The inputs of n tokens: channels before the convolution [n, C]; alpha and beta [n, n_v]."""

    x: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray

    def __getitem__(self, tokens: slice) -> "Inputs":
        return Inputs(self.x[tokens], self.alpha[tokens], self.beta[tokens])


def inputs(net: DeltaNet, n: int, seed: int = 1) -> Inputs:
    rng = np.random.default_rng(seed)
    sizes = (net.n_channels, net.n_v, net.n_v)
    return Inputs(*(rng.standard_normal((n, size)).astype(F) for size in sizes))


def empty_memory(net: DeltaNet, rewind: int, rows: int = 64, n_sequences: int = 1) -> RecurrentCache:
    """What an earlier answer may have stored, which a new one must not read.  rows: the most rows of a pass."""
    shape = RecurrentCacheSpec(net.n_channels, net.n_conv, net.n_k, net.n_v, net.state_size, rewind)
    layer: RecurrentCache = layer_of(
        shape, 0, rows, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    return layer


def run(
    net: DeltaNet, tokens: Inputs, memory: RecurrentCache, first: int = 0, threads: int = 2, slot: int = 0
) -> np.ndarray:
    """One pass over the tokens from position ``first`` on."""
    positions = np.arange(first, first + len(tokens.x), dtype=np.int32)
    batch = Batch(positions, positions, np.full(len(tokens.x), slot, np.int32))
    return Backend(threads).delta_net(net, tokens.x, [tokens.alpha, tokens.beta], memory, batch)


def one_by_one(net: DeltaNet, tokens: Inputs) -> tuple[np.ndarray, RecurrentCache]:
    """Outputs, and a memory that keeps the states of all segments and what all tokens add to them."""
    n = len(tokens.x)
    memory = empty_memory(net, n)
    out = np.concatenate([run(net, tokens[t : t + 1], memory, t, threads=1) for t in range(n)])
    assert np.isfinite(out).all()
    return out, memory


def needed(net: DeltaNet, memory: RecurrentCache, position: int) -> list[bytes]:
    """What a pass at ``position`` reads, in the order of positions."""
    return [b"".join(rows.ring[run].tobytes() for run in rows.runs()) for rows in memory.needed(0, position, no_pages)]


def rounded_once(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c in float32: the product is exact in float64, the sum is rounded to odd there, so that the second rounding
    is the only one that counts (Boldo and Melquiond 2008)."""
    product = np.asarray(a, float) * np.asarray(b, float)
    c = np.broadcast_to(np.asarray(c, float), product.shape)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & (total.view(np.int64) % 2 == 0), odd, total).astype(F)


def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The dot products along the last axis, in the order of the law."""
    a, b = np.broadcast_arrays(a, b)
    chains = np.zeros((*a.shape[:-1], 32), F)
    for i in range(0, a.shape[-1], 32):
        chains = rounded_once(a[..., i : i + 32], b[..., i : i + 32], chains)
    fours = chains.reshape(*a.shape[:-1], 8, 4)
    x = (fours[..., 0] + fours[..., 2]) + (fours[..., 1] + fours[..., 3])
    for width in (4, 2, 1):
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def decay(e: np.ndarray, after: int, t: int) -> np.ndarray:
    """The product of the decays [n, n_v] after a token, up to t."""
    product = np.ones(e.shape[1], F)
    for s in range(after + 1, t + 1):
        product = product * e[s]
    return product


@dataclass
class Law:
    """The law, transcribed, for all tokens of a text.  q, k, v [n, n_v, d]; e, rate [n, n_v]; out, u [n, n_v, d] and
    states, those after each segment, are computed."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    e: np.ndarray
    rate: np.ndarray

    def __post_init__(self) -> None:
        n, n_v, d = self.v.shape
        self.out, self.u = np.empty((n, n_v, d), F), np.empty((n, n_v, d), F)
        self.states = [np.zeros((n_v, d, d), F)]
        for t in range(n):
            self.u[t] = (self.v[t] - self.answer(self.k[t], t, t - 1)) * self.rate[t, :, None]
            self.out[t] = self.answer(self.q[t], t, t)
            if t % 16 == 15:
                state = self.states[-1] * decay(self.e, t - 16, t)[:, None, None]
                for i in range(t - 15, t + 1):
                    part = decay(self.e, i, t)[:, None] * self.u[i]
                    state = rounded_once(part[:, :, None], self.k[i][:, None, :], state)
                self.states.append(state)

    def answer(self, z: np.ndarray, t: int, last: int) -> np.ndarray:
        """The answer to z [n_v, d] of the state at token t with the tokens of its segment up to ``last``."""
        first = t // 16 * 16
        x = decay(self.e, first - 1, t)[:, None] * dot(self.states[-1], z[:, None, :])
        for i in range(first, last + 1):
            x = rounded_once((decay(self.e, i, t) * dot(self.k[i], z))[:, None], self.u[i], x)
        return x


def reference(net: DeltaNet, tokens: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [n, n_v, d] and states [n, n_v, d, d] in float64: the formula of the paper (Yang et al. 2024, equation 10),
    S_t = S_(t-1) (e_t (1 - beta_t k_t k_t^T)) + beta_t v_t k_t^T, o_t = S_t q_t / sqrt(d), with decay e and strength beta as
    in Mamba 2 (Dao and Gu 2024) and convolution, silu and L2 norm of q, k and v before it."""
    n, d = len(tokens.x), net.state_size
    wide = np.concatenate([np.zeros((net.n_conv - 1, net.n_channels)), tokens.x])
    y = sum(wide[j : j + n] * net.conv1d[:, j].astype(float) for j in range(net.n_conv))
    y = (y / (1 + np.exp(-y))).reshape(n, -1, d)
    q, k, v = np.split(y, [net.n_k, 2 * net.n_k], axis=1)
    q, k = (z / np.sqrt((z**2).sum(axis=2, keepdims=True) + net.eps) for z in (q, k))
    ratio = net.n_v // net.n_k
    q, k = (np.repeat(z, ratio, axis=1) if net.grouped else np.tile(z, (1, ratio, 1)) for z in (q, k))
    decay = np.exp(net.a.astype(float) * np.logaddexp(0, tokens.alpha.astype(float) + net.dt))
    strength = 1 / (1 + np.exp(-tokens.beta.astype(float)))
    states, state = np.empty((n, net.n_v, d, d)), np.zeros((net.n_v, d, d))
    for t in range(n):
        e, b, kt = decay[t, :, None, None], strength[t, :, None, None], k[t, :, None, :]
        state = state @ (e * (np.eye(d) - b * np.swapaxes(kt, 1, 2) * kt)) + b * v[t, :, :, None] * kt
        states[t] = state
    return np.einsum("thji,thi->thj", states, q) / np.sqrt(d), states


def by_head(net: DeltaNet, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of each value head, [n, n_v, d], from channels [n, C]."""
    heads = y.reshape(len(y), -1, net.state_size)
    h = np.arange(net.n_v)
    g = h // (net.n_v // net.n_k) if net.grouped else h % net.n_k
    return heads[:, g], heads[:, net.n_k + g], heads[:, 2 * net.n_k + h]


@pytest.mark.parametrize("shape", [*NETS, (2, 6, 32, 4, True)])
def test_the_law(shape: tuple[Any, ...]) -> None:
    """Every bit of results, states and lists, over three segments and a part, in passes that begin and end anywhere."""
    net = random_net(*shape)
    tokens = inputs(net, 53)
    memory, ends = empty_memory(net, 64), [0, 1, 2, 9, 16, 20, 37, 38, 53]
    out = np.concatenate([run(net, tokens[a:b], memory, a) for a, b in pairwise(ends)])
    positions = np.arange(53, dtype=np.int32)
    q, k, v = by_head(net, Backend().convolved(net, tokens.x, empty_memory(net, 64), one_sequence(positions)))
    e, rate = delta_gates(tokens.alpha, tokens.beta, net.a, net.dt).T
    law = Law(q, k, v, e, rate)
    assert out.tobytes() == law.out.tobytes()
    assert memory.deltas[0, :53].tobytes() == law.u.tobytes() and memory.decays[0, :53].tobytes() == e.tobytes()
    first_heads = [g * (net.n_v // net.n_k) if net.grouped else g for g in range(net.n_k)]
    assert memory.keys[0, :53].tobytes() == k[:, first_heads].tobytes()
    assert len(law.states) == 4
    for n in range(1, 4):
        assert memory.states[0, n].tobytes() == law.states[n].tobytes()


@pytest.mark.parametrize("shape", [*NETS, (2, 6, 32, 4, True)])
def test_against_float64(shape: tuple[Any, ...]) -> None:
    """Over 100 tokens, in passes of several lengths, with the state after every segment."""
    net = random_net(*shape)
    tokens = inputs(net, 100)
    memory = empty_memory(net, 100)
    actual = np.concatenate([run(net, tokens[a:b], memory, a) for a, b in ((0, 60), (60, 61), (61, 75), (75, 100))])
    expected, states = reference(net, tokens)
    error = np.abs(actual.reshape(expected.shape) - expected).max() / expected.std()
    assert error < BOUND
    assert np.abs(memory.states[0, 1:7] - states[15:96:16]).max() / states.std() < BOUND


def test_blocks_of_channels_do_not_show() -> None:
    """Of which the last one is not whole."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((20, 160)).astype(F), rng.standard_normal((160, 4)).astype(F)
    positions, sequences = np.arange(20, dtype=np.int32), np.zeros(20, np.int32)
    found = []
    for ends in ((0, 3), (0, 1, 3)):
        ring, y = np.zeros((1, 19, 160), F), np.full_like(x, np.nan)
        for first, last in pairwise(ends):
            delta_net.causal_conv(x, positions, sequences, weight, ring, y, first, last)
        found.append((y.tobytes(), ring.tobytes()))
    assert found[0] == found[1]


@given(
    st.sampled_from([(2, 6, 32, 4), (1, 3, 64, 3)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from([1, 16, 17, 33]),
    st.integers(1, 2),
)
@examples(25)
def test_passes_segments_and_threads_do_not_show(
    shape: tuple[int, int, int, int], batches: list[int], rewind: int, threads: int
) -> None:
    net = random_net(*shape)
    tokens = inputs(net, sum(batches))
    expected, every = one_by_one(net, tokens)
    memory = empty_memory(net, rewind)
    first = 0
    for rows in batches:
        span = slice(first, first + rows)
        assert run(net, tokens[span], memory, first, threads).tobytes() == expected[span].tobytes()
        first += rows
        for position in range(max(0, first - rewind), first + 1):
            assert needed(net, memory, position) == needed(net, every, position)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 33)), min_size=1, max_size=8), st.sampled_from([16, 33]))
@examples(25)
def test_tokens_are_taken_back_by_position_alone(steps: list[tuple[int, int]], rewind: int) -> None:
    """Passes that read any number of wrong tokens, which are rolled back, after any number of right ones."""
    net = random_net(2, 6, 32, 4)
    tokens, wrong = inputs(net, 20 * len(steps) + 1), inputs(net, 64, seed=2)
    expected, every = one_by_one(net, tokens)
    memory, at = empty_memory(net, rewind), 0
    for rows, refused in steps:
        refused = min(refused, rewind)
        parts = zip(vars(tokens[at : at + rows]).values(), vars(wrong[:refused]).values(), strict=True)
        out = run(net, Inputs(*(np.concatenate(pair) for pair in parts)), memory, at)
        assert out[:rows].tobytes() == expected[at : at + rows].tobytes()
        at += rows
        assert needed(net, memory, at) == needed(net, every, at)
    assert run(net, tokens[at : at + 1], memory, at).tobytes() == expected[at].tobytes()


@pytest.mark.parametrize(
    "runs",
    [
        [(2, 0, 1), (0, 15, 1), (1, 37, 1)],
        [(1, 14, 4), (0, 0, 5), (2, 31, 1)],  # one ends a segment in its middle, one at its end
        [(0, 7, 60), (2, 0, 41), (1, 64, 50)],  # more segments and more rows than the rings have
    ],
)
@pytest.mark.parametrize("shape", [(2, 6, 32, 4), (2, 4, 64, 1, True)])
def test_rows_of_several_sequences(shape: tuple[Any, ...], runs: list[tuple[int, int, int]]) -> None:
    """One pass over runs (slot, position, rows) is a pass over each of them: results, and all that is stored."""
    net = random_net(*shape)
    texts = [inputs(net, 128, seed) for seed in range(3)]
    memory = empty_memory(net, 16, n_sequences=3)
    for slot, first, _ in runs:
        if first:
            run(net, texts[slot][:first], memory, slot=slot)
    alone = replace(memory, **{name: array.copy() for name, array in arrays_of(memory).items()})
    parts = [texts[slot][first : first + rows] for slot, first, rows in runs]
    expected = [run(net, part, alone, first, 1, slot) for part, (slot, first, _) in zip(parts, runs, strict=True)]
    out = together(net, parts, runs, memory)
    assert out.tobytes() == np.concatenate(expected).tobytes() and np.isfinite(out).all()
    for name, array in arrays_of(memory).items():
        assert array.tobytes() == vars(alone)[name].tobytes(), name


def together(
    net: DeltaNet, parts: list[Inputs], runs: list[tuple[int, int, int]], memory: RecurrentCache
) -> np.ndarray:
    """One mixed pass over the inputs of runs (slot, position, rows)."""
    x, alpha, beta = (np.concatenate(arrays) for arrays in zip(*(vars(part).values() for part in parts), strict=True))
    positions = np.concatenate([np.arange(first, first + rows, dtype=np.int32) for _, first, rows in runs])
    sequences = np.concatenate([np.full(rows, slot, np.int32) for slot, _, rows in runs])
    return Backend(2).delta_net(net, x, [alpha, beta], memory, Batch(positions, positions, sequences, True))


def test_repeated_rows() -> None:
    """Copies of the last row of a run after it, and of a first row elsewhere, change nothing: also where a segment ends."""
    net = random_net(2, 6, 32, 4)
    texts = [inputs(net, 40, seed) for seed in range(2)]
    memory = empty_memory(net, 16, n_sequences=2)
    runs = [(0, 13, 3), (1, 14, 5)]
    for slot, first, _ in runs:
        if first:
            run(net, texts[slot][:first], memory, slot=slot)
    again = replace(memory, **{name: array.copy() for name, array in arrays_of(memory).items()})
    expected = together(net, [texts[slot][first : first + rows] for slot, first, rows in runs], runs, memory)
    padded = [(0, 13, 3), (0, 15, 1), (0, 15, 1), (1, 14, 5), (0, 13, 1), (1, 14, 1)]
    out = together(net, [texts[slot][first : first + rows] for slot, first, rows in padded], padded, again)
    assert out.tobytes() == expected[[0, 1, 2, 2, 2, 3, 4, 5, 6, 7, 0, 3]].tobytes()
    for name, array in arrays_of(again).items():
        assert array.tobytes() == vars(memory)[name].tobytes(), name


@pytest.mark.parametrize("first", [0, 13])
def test_a_token_says_nothing_about_those_before_it(first: int) -> None:
    net = random_net(2, 4, 32, 4)
    tokens, other = inputs(net, first + 12), inputs(net, first + 12)
    at = first + 7
    other.x[at], other.alpha[at], other.beta[at] = np.nan, np.inf, -np.inf
    outs = []
    for given_tokens in (tokens, other):
        memory = empty_memory(net, 12)
        if first:
            run(net, given_tokens[:first], memory)
        outs.append(run(net, given_tokens[first:], memory, first)[:7])
    assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.parametrize("d", [32, 64, 96, 128])
def test_what_is_written_is_read(d: int) -> None:
    """At full strength and without decay, the state answers the key with the value, whatever it held before; at strength 0 it
    does not change."""
    rng = np.random.default_rng(d)
    k, v = (rng.standard_normal(d).astype(F) for _ in range(2))
    k /= np.sqrt((k**2).sum())
    memory = empty_memory(DeltaNet(1, 1, d, 1, EPS, *[np.empty(0)] * 4), 1)
    state = memory.states[0, 1, 0] = rng.standard_normal((d, d))
    for position, beta, expected in ((16, 99.0, v), (17, -99.0, v)):
        y, gate = np.concatenate([k, k, v if position == 16 else 5 * v])[None], np.full((1, 1), beta, F)
        out, places = np.empty((1, 1, d), F), (np.array([position], np.int32), np.zeros(1, np.int32))
        lists = memory.states, memory.keys, memory.deltas, memory.decays
        delta_net.delta_rule(y, 1, False, gate, gate, 0, np.zeros(1, F), np.zeros(1, F), *places, *lists, out, 0, 1)
        delta_net.keep_keys(y, 1, *places, memory.keys, 0, 1)
        assert np.abs(out - expected).max() < 2e-5
        change = memory.deltas[0, position, 0][:, None] * k
    assert not change.any() and not np.isnan(state).any()


def test_l2_norm_adds_epsilon_to_the_sum() -> None:
    """Epsilon is added neither to the mean nor as a lower bound of the length."""
    y = np.full((1, 128), 1e-4, F)  # a query and a key
    y[0, 64:] = 0
    delta_net.l2_norm(y, 1, 64, F(EPS), F(1), 0, 2)
    assert np.allclose(y[0, :64], 1e-4 / np.sqrt(64e-8 + 1e-6), rtol=1e-6)
    assert not y[0, 64:].any()


@pytest.mark.parametrize("d", [32, 64, 128])
def test_gated_norm(d: int) -> None:
    rng = np.random.default_rng(d)
    x, gate = (rng.standard_normal((5, 3 * d)).astype(F) for _ in range(2))
    x[2] *= 1e-4  # makes epsilon matter
    weight = rng.uniform(0.5, 1.5, d).astype(F)
    wide, z = (a.astype(float).reshape(5, 3, d) for a in (x, gate))
    expected = wide / np.sqrt((wide**2).mean(axis=2, keepdims=True) + EPS) * weight * z / (1 + np.exp(-z))
    actual = Backend().gated_norm(x, weight, gate, EPS)
    assert np.allclose(actual, expected.reshape(5, -1), rtol=20 * 2.0**-23, atol=0)
