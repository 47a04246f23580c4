"""How far the delta rule in segments and token by token is from float64.

    python -m benchmarks.lazy_states [--tokens 4096] [--d 128] [--seed 0]

``lazy`` is the engine's law (``engine/cpu/delta_net.py``): a state per segment of 16 tokens, and lists of the tokens since.
``plain`` updates the state at every token in float32, in the order of sums of earlier versions of the engine.  Both get the
same float32 inputs as the recurrence in float64.  Errors are relative: root mean square of the difference by that of the
float64 values, over the results of all tokens, and over the states at the ends of all segments.
"""

import argparse
from dataclasses import dataclass

import numpy as np
from numba import njit

from engine.cache.pages import PagedMemory
from engine.cache.recurrent import SEGMENT, RecurrentCacheSpec
from engine.cache.types import F16
from engine.cpu import delta_net
from engine.numerics import fma, sigmoid

F = np.float32


@njit(cache=True, error_model="numpy")
def plain_dot(a, b):
    """a . b in 32 chains."""
    chains = np.zeros(32, np.float32)
    for i in range(a.size):
        chains[i % 32] = fma(a[i], b[i], chains[i % 32])
    for g in range(8):
        chains[g] = (chains[4 * g] + chains[4 * g + 2]) + (chains[4 * g + 1] + chains[4 * g + 3])
    for half in (4, 2, 1):
        for g in range(half):
            chains[g] = chains[g] + chains[g + half]
    return chains[0]


@njit(cache=True, error_model="numpy")
def plain(q, k, v, e, rate, out, states):
    """M = M * e; u = (v - M k) * rate; M = M + u k^T; out = M q: q, k, v, out [n, d], e, rate [n], states [n / 16, d, d]."""
    n, d = v.shape
    state = np.zeros((d, d), np.float32)
    for t in range(n):
        for j in range(d):
            for i in range(d):
                state[j, i] = state[j, i] * e[t]
            u = (v[t, j] - plain_dot(state[j], k[t])) * rate[t]
            for i in range(d):
                state[j, i] = fma(u, k[t, i], state[j, i])
            out[t, j] = plain_dot(state[j], q[t])
        if t % SEGMENT == SEGMENT - 1:
            states[t // SEGMENT] = state


@dataclass
class Text:
    """Inputs of one head: q, k, v float32 [n, d], normalized, alpha, beta float32 [n], and dt, so that exp(-softplus(alpha +
    dt)) is the decay of a token."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    dt: float

    @staticmethod
    def random(n: int, d: int, decay: float, rng: np.random.Generator) -> "Text":
        """Tokens whose decays vary around ``decay``.  Queries and keys come from SiLU, as in a model, so that they are not
        orthogonal on average."""
        q, k, v = (x / (1 + np.exp(-x)) for x in rng.standard_normal((3, n, d)))
        q, k = (x / np.sqrt((x**2).sum(axis=1, keepdims=True)) for x in (q, k))
        alpha, beta = rng.standard_normal((2, n))
        dt = np.log(np.expm1(-np.log(decay)))
        q, k, v, alpha, beta = (x.astype(F) for x in (q / np.sqrt(d), k, v, alpha, beta))
        return Text(q, k, v, alpha, beta, dt)


def lazy(text: Text) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Results [n, d], states [n / 16, d, d], and the decays [n] by the engine's kernel."""
    n, d = text.v.shape
    memory = RecurrentCacheSpec(3 * d, 1, 1, 1, d, n).allocate(PagedMemory(0, n, np.zeros), F16)
    y = np.concatenate([text.q, text.k, text.v], axis=1)
    out, places = np.empty((n, 1, d), F), (np.arange(n, dtype=np.int32), np.zeros(n, np.int32))
    gates = text.alpha[:, None], text.beta[:, None], 0, np.full(1, -1, F), np.full(1, text.dt, F)
    lists = memory.states, memory.keys, memory.deltas, memory.decays
    delta_net.delta_rule(y, 1, False, *gates, *places, *lists, out, 0, 1)
    return out[:, 0], memory.states[0, 1 : n // SEGMENT + 1, 0], memory.decays[0, :n, 0]


def exact(text: Text, e: np.ndarray, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Results [n, d] and states [n / 16, d, d] of the recurrence in float64."""
    q, k, v, e, rate = (x.astype(float) for x in (text.q, text.k, text.v, e, rate))
    n, d = v.shape
    out, states, state = np.empty((n, d)), np.empty((n // SEGMENT, d, d)), np.zeros((d, d))
    for t in range(n):
        state *= e[t]
        state += np.outer((v[t] - state @ k[t]) * rate[t], k[t])
        out[t] = state @ q[t]
        if t % SEGMENT == SEGMENT - 1:
            states[t // SEGMENT] = state
    return out, states


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The relative root mean square error."""
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of 16 (4096)")
    parser.add_argument("--d", type=int, default=128, help="elements of a key (128)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, n, d = np.random.default_rng(args.seed), args.tokens // SEGMENT * SEGMENT, args.d
    print(f"{n} tokens, d = {d}\n")
    print("|  decay | out, plain | out, lazy | ratio | state, plain | state, lazy | ratio |")
    print("| -----: | ---------: | --------: | ----: | -----------: | ----------: | ----: |")
    for decay in (0.99999, 0.9999, 0.999, 0.99, 0.9, 0.5, 0.1):
        text = Text.random(n, d, decay, rng)
        out, states, e = lazy(text)
        rate = np.array([sigmoid(x) for x in text.beta], F)
        plain_out, plain_states = np.empty((n, d), F), np.empty((n // SEGMENT, d, d), F)
        plain(text.q, text.k, text.v, e, rate, plain_out, plain_states)
        right_out, right_states = exact(text, e, rate)
        a, b = error(plain_out, right_out), error(out, right_out)
        c, g = error(plain_states, right_states), error(states, right_states)
        print(f"| {decay:6g} | {a:10.2e} | {b:9.2e} | {b / a:5.2f} | {c:12.2e} | {g:11.2e} | {g / c:5.2f} |")


if __name__ == "__main__":
    main()
