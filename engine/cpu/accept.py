"""Acceptance of drafted tokens: which drafts the target keeps, and which token replaces one that it rejects.

Formula: x is a draft for one position; p and q are the probabilities under the target and under the draft source there.
    ratio: x is kept if u q(x) < p(x) with u uniform; else the token is drawn from max(p - q, 0), normalized.  With x drawn
        from q, the result has the distribution p (Leviathan, Kalman and Matias 2023, theorem 3.5; Chen et al. 2023,
        theorem 1).
    p-min: x is kept if p(x) is at least a bound, or if x is the token that the target has drawn; else the token is the one
        that the target has drawn.  This favours drafts, so the distribution is not p.
    Exact acceptance needs no arithmetic: x is kept if it is the token that the target has drawn.
    The draw from max(p - q, 0) is the arg max of log max(p - q, 0) + noise, which needs no normalization.
Shapes: lists of candidates, ids int32 [n] (distinct) and probabilities float32 [n]; a token that is not on a list has
    probability 0.  A draft without a list (n_q = 0) was not drawn but is certain: q(x) = 1.
Who owns what: one call, one thread, one draft.
Reduction order: probabilities are divided by their ``tree_sum``, in the order of the list; there is no other sum.
Bytes moved: 8 (n_p + n_q), and the same again where a draft is rejected.

All noise is a function of seed, position and token, as in ``engine/cpu/sample.py``, so a step gives the same tokens on every
device and every time it is repeated.  The three uses of the noise must be independent: a draft that was chosen because of
its own noise must not be judged by that noise again.  So each use has its own seed.
"""

import numpy as np
from numba import njit

from engine.cpu.sample import argmax, pack, place_of, tree_sum
from engine.numerics import exp, gumbel, log, uniform

f32 = np.float32
i64 = np.int64
u64 = np.uint64

ACCEPT_SEED = u64(0xD1B54A32D192ED03)
"""XORed with the seed, it gives the seed of the noise that accepts or rejects a draft; the draws use the seed itself."""
RESAMPLE_SEED = u64(0x8CB92BA72F3D8DD7)
"""XORed with the seed, it gives the seed of the draw that replaces a rejected draft."""

_ZERO = f32(0.0)
_ONE = f32(1.0)


@njit(cache=True, error_model="numpy")
def probabilities(values, n, temperature, out, partial):
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
def probability_of(x, ids, p, n):
    """p of token x; 0 if it is not on the list."""
    for i in range(n):
        if ids[i] == x:
            return p[i]
    return _ZERO


@njit(cache=True, error_model="numpy")
def accept_ratio(p_ids, p, n_p, q_ids, q, n_q, x, seed, position):
    """(whether draft x is kept, the token for ``position``); n_p > 0; n_q = 0 for a draft that was not drawn."""
    q_x = probability_of(x, q_ids, q, n_q) if n_q > 0 else _ONE
    if uniform(u64(seed) ^ ACCEPT_SEED, position, x) * q_x < probability_of(x, p_ids, p, n_p):
        return True, i64(x)
    return False, resample(p_ids, p, n_p, q_ids, q, n_q, x, seed, position)


@njit(cache=True, error_model="numpy")
def resample(p_ids, p, n_p, q_ids, q, n_q, x, seed, position):
    """The token that replaces the rejected draft x: a draw from max(p - q, 0), or from p if rounding leaves nothing of
    max(p - q, 0); ties go to the lower id."""
    # q by token, up to the largest id: searching one list for each entry of another as long as a vocabulary is too slow.
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
def accept_p_min(p_ids, p, n_p, x, drawn, p_accept):
    """(whether draft x is kept, the token); ``drawn``: the token the target has drawn; p_accept float32: the bound."""
    if x == drawn or probability_of(x, p_ids, p, n_p) >= p_accept:
        return True, i64(x)
    return False, i64(drawn)
