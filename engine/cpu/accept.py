"""Acceptance of drafted tokens: which of them the target keeps, and what stands where one is refused.

Formula: x is a draft for one position, p and q are the probabilities of the target and of the draft's source there.
    ratio: x stays if u q(x) < p(x), u uniform; else the token is drawn from max(p - q, 0), normalized.  With x from q, what
        comes out has the distribution p (Leviathan, Kalman and Matias 2023, theorem 3.5; Chen et al. 2023, theorem 1).
    p-min: x stays if p(x) is at least a bound, or if x is what the target has drawn; else the token is what it has drawn.
        This favours drafts, so the distribution is not p.
    Exact acceptance needs no arithmetic: x stays if it is what the target has drawn.
    The draw from max(p - q, 0) is the arg max of log max(p - q, 0) + noise, which needs no normalization.
Shapes: lists of candidates, ids int32 [n] (distinct) and probabilities float32 [n]; a token that is not on a list has
    probability 0.  A draft of no list (n_q = 0) was not drawn but is certain: q(x) = 1.
Who owns what: one call, one thread, one draft.
Reduction order: probabilities are divided by their ``tree_sum``, in the order of the list; nothing else is a sum.
Bytes moved: 8 (n_p + n_q), and again where a draft is refused.

All noise is a function of seed, position and token, as in ``engine/cpu/sample.py``, so a step gives the same tokens on every
device and as often as it is repeated.  The three uses of it must not know of each other: a draft that its own noise has
brought to the front must not be judged by that noise again.  So each has a seed of its own.
"""

import numpy as np
from numba import njit

from engine.cpu.sample import argmax, pack, place_of, tree_sum
from engine.numerics import exp, gumbel, log, uniform

f32 = np.float32
i64 = np.int64
u64 = np.uint64

ACCEPT_SEED = u64(0xD1B54A32D192ED03)
"""Differs the seed of what decides about a draft from that of the draws."""
RESAMPLE_SEED = u64(0x8CB92BA72F3D8DD7)
"""The same for the draw where a draft is refused."""

_ZERO = f32(0.0)
_ONE = f32(1.0)


@njit(cache=True, error_model="numpy")
def probabilities(values, n, temperature, out, partial):  # type: ignore[no-untyped-def]
    """``out[:n]`` = softmax(values[:n] / temperature), n > 0, as exp((value - largest) / temperature) / total.

    values: the logits of a list of candidates (``Sampler.candidates``); partial: float32 [ceil(n / 256)].
    """
    top = values[argmax(values, n)]
    for i in range(n):
        out[i] = exp((values[i] - top) / temperature)
    total = tree_sum(out, n, partial)
    for i in range(n):
        out[i] = out[i] / total


@njit(cache=True, error_model="numpy")
def probability_of(x, ids, p, n):  # type: ignore[no-untyped-def]
    """p of token x; 0 if it is not on the list."""
    for i in range(n):
        if ids[i] == x:
            return p[i]
    return _ZERO


@njit(cache=True, error_model="numpy")
def accept_ratio(p_ids, p, n_p, q_ids, q, n_q, x, seed, position):  # type: ignore[no-untyped-def]
    """(whether draft x stays, the token for ``position``); n_p > 0, n_q = 0 for a draft that was not drawn."""
    q_x = probability_of(x, q_ids, q, n_q) if n_q > 0 else _ONE
    if uniform(u64(seed) ^ ACCEPT_SEED, position, x) * q_x < probability_of(x, p_ids, p, n_p):
        return True, i64(x)
    return False, resample(p_ids, p, n_p, q_ids, q, n_q, x, seed, position)


@njit(cache=True, error_model="numpy")
def resample(p_ids, p, n_p, q_ids, q, n_q, x, seed, position):  # type: ignore[no-untyped-def]
    """The token where draft x was refused: a draw from max(p - q, 0), or from p should rounding leave nothing of that; ties
    to the lower id."""
    # q by token, as far as it goes: two lists as long as a vocabulary must not be searched for each other's entries.
    last = i64(x)
    for j in range(n_q):
        last = max(last, i64(q_ids[j]))
    others = np.zeros(last + 1, f32)
    if n_q == 0:
        others[x] = _ONE
    for j in range(n_q):
        others[q_ids[j]] = q[j]
    rest = np.empty(n_p, f32)
    nothing = True
    for j in range(n_p):
        rest[j] = p[j] - others[p_ids[j]] if p_ids[j] <= last else p[j]
        nothing = nothing and not rest[j] > _ZERO
    best = u64(0)
    for j in range(n_p):
        share = p[j] if nothing else rest[j]
        if nothing or share > _ZERO:
            best = max(best, pack(log(share) + gumbel(u64(seed) ^ RESAMPLE_SEED, position, p_ids[j]), p_ids[j]))
    return place_of(best)


@njit(cache=True, error_model="numpy")
def accept_p_min(p_ids, p, n_p, x, drawn, p_accept):  # type: ignore[no-untyped-def]
    """(whether draft x stays, the token); ``drawn``: what the target has drawn, p_accept: float32, the bound."""
    if x == drawn or probability_of(x, p_ids, p, n_p) >= p_accept:
        return True, i64(x)
    return False, i64(drawn)
