"""DRY ("don't repeat yourself"): a penalty on tokens that would continue a repetition, larger for longer ones.

Source: p-e-w 2024 (text-generation-webui, PR 5677); the search by Z-algorithm and the breakers are those of llama.cpp
(PR 9702) and KoboldCpp.

Formula: the window is the last tokens of the text.  For a token t, L(t) is the length of the longest run of tokens that ends
    the window and also occurs earlier in it with t after it; the two may overlap.  A run does not reach back beyond the last
    breaker in the window, so L(t) <= the number of tokens after it.  If there is such a run of at least ``allowed`` tokens,
    logit(t) -= multiplier * base ** (L(t) - allowed), unless t alone is a breaker.
Shapes: logits float32 [n_vocab]; window int64 [n], oldest token first; the breakers as described in :func:`unbroken`.
Who owns what: one call, one thread, one row of logits; a logit is changed at most once.
Reduction order: L(t) is a maximum of integers.  The power is a product of float64 squares of the base, that of the lowest
    bit of the exponent first; the penalty is rounded to float32 once, and is at most the largest float32.
Bytes moved: 8 n for the window, read three times at most, and 4 per token after the last breaker, written and read once.
"""

import numpy as np
from numba import njit

f32 = np.float32
i32 = np.int32
i64 = np.int64

_LARGEST = float(np.finfo(np.float32).max)


@njit(cache=True, error_model="numpy")
def penalize_repetitions(logits, window, multiplier, base, allowed, alone, heads, starts, tails, longest):
    """Subtract the penalties in place; ``longest`` is int32 [n_vocab], all 0 before and after the call."""
    limit = unbroken(window, alone, heads, starts, tails)
    if limit < allowed:
        return
    find_repetitions(window, limit, allowed, longest)
    for i in range(window.size):
        token = window[i]
        length = i64(longest[token]) - 1
        longest[token] = i32(0)
        if length >= 0 and not alone[token]:
            logits[token] = logits[token] - penalty(multiplier, base, length - allowed)


@njit(cache=True, error_model="numpy")
def unbroken(window, alone, heads, starts, tails):
    """The number of tokens after the last breaker of the window; all if there is none.

    alone: bool [n_vocab], the tokens that are breakers by themselves.  Breaker b of the others is the token ``heads[b]``
    followed by ``tails[starts[b]:starts[b + 1]]``; heads int64 [m] ascending, starts int64 [m + 1], tails int64.  The last
    one is the one that begins last; of those that begin there it is the longest.
    """
    n = window.size
    for after in range(n):
        token = window[n - 1 - after]
        longest = 0 if alone[token] else -1
        b = np.searchsorted(heads, token)
        while b < heads.size and heads[b] == token:
            size = starts[b + 1] - starts[b]
            if longest < size <= after and _follows(window, n - after, tails, starts[b], size):
                longest = size
            b += 1
        if longest >= 0:
            return after - longest
    return n


@njit(cache=True, error_model="numpy")
def _follows(window, at, tails, start, size):
    j = 0
    while j < size and window[at + j] == tails[start + j]:
        j += 1
    return j == size


@njit(cache=True, error_model="numpy")
def find_repetitions(window, limit, allowed, longest):
    """``longest[t]`` = L(t) + 1 for each token t with L(t) >= allowed; the others keep their 0.

    The Z-algorithm (Gusfield 1997) on the window read from its end: z[k] is the number of tokens, at most ``limit``, that
    the ends of the window and of the window without its last k tokens have in common.  [left, right) is the stretch, of
    those found so far, that reaches furthest back; what lies in it was compared before, so each token is reached once and
    the search is linear.
    """
    n = window.size
    last = n - 1
    z = np.empty(limit, i32)
    left = i64(0)
    right = i64(0)
    for k in range(1, n):
        same = i64(0)
        if k < right:
            same = min(right - k, i64(z[k - left]))
        if k + same >= right:
            while same < limit and k + same < n and window[last - same] == window[last - k - same]:
                same += 1
            left = i64(k)
            right = k + same
        if k < limit:
            z[k] = same
        if same >= allowed:
            token = window[n - k]
            longest[token] = max(longest[token], i32(same + 1))


@njit(cache=True, error_model="numpy")
def penalty(multiplier, base, exponent):
    """multiplier * base ** exponent as float32, at most the largest; float64 multiplier > 0 and base >= 1, exponent >= 0."""
    power = 1.0
    while exponent > 0:
        if exponent & 1:
            power = power * base
        base = base * base
        exponent >>= 1
    return f32(min(multiplier * power, _LARGEST))
