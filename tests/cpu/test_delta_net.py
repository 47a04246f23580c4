"""The gated delta rule against float64, and the paths whose choice must not affect a bit."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arrays import Pass
from engine.cache.recurrent import RecurrentLayer
from engine.cpu import delta_net
from engine.models.delta_net import DeltaNet
from tests.mirror import Mirror as Backend
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


def empty_memory(net: DeltaNet, slots: int, rows: int) -> RecurrentLayer:
    """What an earlier answer may have stored, which a new one must not read."""
    conv = np.full((max(rows, slots) + net.n_conv - 1, net.n_channels), np.nan, F)
    return RecurrentLayer(conv, np.full((slots, net.n_v, net.state_size, net.state_size), np.nan, F))


def run(net: DeltaNet, tokens: Inputs, memory: RecurrentLayer, first: int = 0, threads: int = 2) -> np.ndarray:
    """One pass over the tokens from position ``first`` on."""
    positions = np.arange(first, first + len(tokens.x), dtype=np.int32)
    return Backend(threads).delta_net(net, tokens.x, [tokens.alpha, tokens.beta], memory, Pass(positions, positions))


def one_by_one(net: DeltaNet, tokens: Inputs) -> tuple[np.ndarray, RecurrentLayer]:
    """Outputs, and a memory that keeps the state after every token."""
    n = len(tokens.x)
    memory = empty_memory(net, n, 1)
    return np.concatenate([run(net, tokens[t : t + 1], memory, t, threads=1) for t in range(n)]), memory


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


@pytest.mark.parametrize("shape", [*NETS, (2, 6, 32, 4, True)])
def test_against_float64(shape: tuple[Any, ...]) -> None:
    """Over 100 tokens, in passes of several lengths, with the state after every one of them."""
    net = random_net(*shape)
    tokens = inputs(net, 100)
    memory = empty_memory(net, 100, 60)
    actual = np.concatenate([run(net, tokens[a:b], memory, a) for a, b in ((0, 60), (60, 61), (61, 75), (75, 100))])
    expected, states = reference(net, tokens)
    error = np.abs(actual.reshape(expected.shape) - expected).max() / expected.std()
    assert error < BOUND
    assert np.abs(memory.states - states).max() / states.std() < BOUND


@given(
    st.sampled_from([(2, 6, 32, 4), (1, 3, 64, 3)]),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 2),
)
@examples(25)
def test_passes_slots_and_threads_do_not_show(
    shape: tuple[int, int, int, int], batches: list[int], slots: int, threads: int
) -> None:
    net = random_net(*shape)
    tokens = inputs(net, sum(batches))
    expected, every = one_by_one(net, tokens)
    memory = empty_memory(net, slots, max(batches))
    first = 0
    for rows in batches:
        span = slice(first, first + rows)
        assert run(net, tokens[span], memory, first, threads).tobytes() == expected[span].tobytes()
        first += rows
        for p in range(first - min(rows, slots), first):
            assert memory.states[p % slots].tobytes() == every.states[p].tobytes()


@given(st.integers(1, 20), st.integers(1, 8), st.data())
@examples(25)
def test_tokens_are_taken_back_by_position_alone(prompt: int, drafts: int, data: st.DataObject) -> None:
    """After any number of kept drafts, the continuation is the same as without drafts."""
    net, slots = random_net(2, 6, 32, 4), 9  # one more than rows: the state before the first row is also needed
    kept = data.draw(st.integers(0, drafts - 1))
    tokens, wrong = inputs(net, prompt + kept + 4), inputs(net, drafts, seed=2)
    memory = empty_memory(net, slots, max(prompt, slots))
    run(net, tokens[:prompt], memory)
    right = tokens[prompt : prompt + kept]
    pairs = zip(vars(right).values(), vars(wrong).values(), strict=True)
    run(net, Inputs(*(np.concatenate([a, b[kept:]]) for a, b in pairs)), memory, prompt)
    actual = run(net, tokens[prompt + kept :], memory, prompt + kept)
    expected, every = one_by_one(net, tokens)
    assert actual.tobytes() == expected[prompt + kept :].tobytes()
    last = prompt + kept + 3
    assert memory.states[last % slots].tobytes() == every.states[last].tobytes()


def test_a_token_says_nothing_about_those_before_it() -> None:
    net = random_net(2, 4, 32, 4)
    tokens, other = inputs(net, 12), inputs(net, 12)
    other.x[7], other.alpha[7], other.beta[7] = np.nan, np.inf, -np.inf
    expected = run(net, tokens, empty_memory(net, 12, 12))
    actual = run(net, other, empty_memory(net, 12, 12))
    assert actual[:7].tobytes() == expected[:7].tobytes()


@pytest.mark.parametrize("d", [32, 64, 96, 128])
def test_what_is_written_is_read(d: int) -> None:
    """At full strength and without decay, the state answers the key with the value, whatever it held before; at strength 0 it
    does not change."""
    rng = np.random.default_rng(d)
    state, k, v = (rng.standard_normal(shape).astype(F) for shape in ((d, d), d, d))
    k /= np.sqrt((k**2).sum())
    out, chains, before = np.empty(d, F), np.empty(32, F), state.copy()
    delta_net.delta_step(state, k, k, v, F(1), F(1), chains, out)
    assert np.abs(out - v).max() < 1e-5
    across = rng.standard_normal(d)
    across -= (across @ k) * k
    assert np.abs((state - before) @ across).max() < 1e-5
    delta_net.delta_step(before, k, k, v, F(0.5), F(0), chains, out)
    assert np.abs(out - before @ k).max() < 1e-6


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
