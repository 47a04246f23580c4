"""Sampling: from one row of logits to one token, the same token on every device.

A *candidate list* is a pair of arrays, ``values`` float32 (the logits) and ``ids`` int32 (the tokens), whose first ``n``
entries count.  The list starts as the whole vocabulary in the order of token ids.  :func:`top_k`, :func:`typical` and
:func:`top_p` sort it: logit descending, ties by lower token id.  Every sum over a list runs in the order of the list, in
one of two ways:

* :func:`tree_sum` for totals (softmax denominators, expected logits);
* :func:`reach` for running totals: entries are added one by one inside a chunk of 256 consecutive entries, and the
  totals of the finished chunks are added one by one; the running total is the sum of the two.

Selecting and sorting compare integers (:func:`order_key`), so any algorithm gives the same list.  NaN sorts above all
other values: a list whose first value is not NaN contains none.

Semantics of the filters follow llama.cpp's ``llama-sampler.cpp`` with ``min_keep = 0``.
"""

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.numerics import exp, float_bits, fma, gumbel, log, uniform

f32 = np.float32
i32 = np.int32
i64 = np.int64
u32 = np.uint32
u64 = np.uint64

CHUNK = 256  # entries of one chunk of a sum
LANES = 32  # partial sums of one chunk of tree_sum
FEW = 1024  # lists up to this long are selected and sorted with a heap, longer ones with a radix sort
_BLOCK = 64  # entries whose largest is compared with the heap at once
_DIGITS = 2048  # a radix sort of 11 bits at a time

_LN2_ABOVE = f32(0.6935)  # ln 2, rounded up by more than the errors of numerics.gumbel
_INF = f32(np.inf)
_ZERO = f32(0.0)


# --- order -----------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def order_key(x):
    """An int32 that orders as the float32 x does; -0 equals +0, and NaN is the largest."""
    bits = float_bits(x + _ZERO)
    key = i32(bits ^ ((bits >> i32(31)) & i32(0x7FFFFFFF)))
    nan = (bits & i32(0x7FFFFFFF)) > i32(0x7F800000)
    return i32(0x7FFFFFFF) if nan else key


@njit(cache=True, error_model="numpy")
def pack(x, place):
    """A uint64 that is larger for larger x and, at equal x, for the lower place (0 <= place < 2**31)."""
    return (u64(i64(order_key(x)) + i64(0x80000000)) << u64(32)) | u64(i64(0xFFFFFFFF) - i64(place))


@njit(cache=True, error_model="numpy")
def place_of(key):
    """The place that :func:`pack` put into a key."""
    return i64(0xFFFFFFFF) - i64(key & u64(0xFFFFFFFF))


@njit(cache=True, error_model="numpy")
def _block_max(block):
    """The largest order_key of ``_BLOCK`` values.  It takes a slice, not an offset: then Numba knows that no index is
    negative, and vectorizes the loop."""
    top = i32(-0x80000000)
    for i in range(_BLOCK):
        top = max(top, order_key(block[i]))
    return top


@njit(cache=True, error_model="numpy")
def argmax(values, n):
    """The first place of the largest of ``values[:n]``, n > 0; the first NaN if there is one."""
    best = i64(order_key(values[0]))
    block = i64(0)
    whole = n - n % _BLOCK
    for start in range(0, whole, _BLOCK):
        top = i64(_block_max(values[start : start + _BLOCK]))
        if top > best:
            best = top
            block = start
    for i in range(whole, n):
        if i64(order_key(values[i])) > best:
            best = i64(order_key(values[i]))
            block = i
    place = block
    while i64(order_key(values[place])) != best:
        place += 1
    return place


@njit(cache=True, error_model="numpy")
def _sift(keys, root, n):
    """Move ``keys[root]`` down until ``keys[:n]`` is a heap with its smallest first."""
    key = keys[root]
    child = 2 * root + 1
    while child < n:
        if child + 1 < n and keys[child + 1] < keys[child]:
            child += 1
        if key <= keys[child]:
            break
        keys[root] = keys[child]
        root = child
        child = 2 * root + 1
    keys[root] = key


@njit(cache=True, error_model="numpy")
def _heap_sort(keys, n):
    """Sort ``keys[:n]`` descending."""
    for root in range(n // 2 - 1, -1, -1):
        _sift(keys, root, n)
    for last in range(n - 1, 0, -1):
        key = keys[0]
        keys[0] = keys[last]
        keys[last] = key
        _sift(keys, i64(0), last)


@njit(cache=True, error_model="numpy")
def _radix_sort(keys, spare, n):
    """Sort ``keys[:n]``, given in the order of their places, descending: three stable passes over the upper 32 bits,
    11 bits at a time from the lowest."""
    count = np.zeros((3, _DIGITS), i32)
    for i in range(n):
        for d in range(3):
            count[d, _digit(keys[i], d)] += i32(1)
    source = keys
    target = spare
    for d in range(3):
        start = i32(0)
        for digit in range(_DIGITS - 1, -1, -1):
            size = count[d, digit]
            count[d, digit] = start
            start += size
        for i in range(n):
            digit = _digit(source[i], d)
            target[count[d, digit]] = source[i]
            count[d, digit] += i32(1)
        source, target = target, source
    for i in range(n):
        keys[i] = spare[i]


@njit(cache=True, error_model="numpy")
def _digit(key, d):
    return i64((key >> u64(32 + 11 * d)) & u64(_DIGITS - 1))


@njit(cache=True, error_model="numpy")
def sort_keys(keys, spare, n):
    """Sort ``keys[:n]``, given in the order of their places, descending; ``spare`` is scratch of the same size."""
    if n > FEW:
        _radix_sort(keys, spare, n)
    else:
        _heap_sort(keys, n)


@njit(cache=True, error_model="numpy")
def sort_from(values, n, least, keys, spare):
    """The packed keys of those of ``values[:n]`` that are not below ``least``, sorted descending; returns their number."""
    m = i64(0)
    for i in range(n):
        if not values[i] < least:
            keys[m] = pack(values[i], i)
            m += 1
    sort_keys(keys, spare, m)
    return m


@njit(cache=True, error_model="numpy")
def select(values, n, k, keys):
    """Put the packed keys of the k largest of ``values[:n]`` into ``keys[:k]``, sorted descending; 0 < k <= n.

    One pass with a heap of the k best so far, which visits a block of values only when its largest can enter: fast
    for k up to :data:`FEW`.
    """
    for i in range(k):
        keys[i] = pack(values[i], i)
    for root in range(k // 2 - 1, -1, -1):
        _sift(keys, root, k)
    start = i64(k)
    while start < n:
        stop = min(start + _BLOCK, n)
        block = values[start:stop]
        # Strictly above: of equal values, those at lower places, which were met first, stay.
        if stop - start < _BLOCK or u64(i64(_block_max(block)) + i64(0x80000000)) > keys[0] >> u64(32):
            for i in range(start, stop):
                key = pack(values[i], i)
                if key > keys[0]:
                    keys[0] = key
                    _sift(keys, i64(0), k)
        start = stop
    _heap_sort(keys, k)


@njit(cache=True, error_model="numpy")
def gather(values, ids, keys, n, out_values, out_ids):
    """Copy the entries at the places of ``keys[:n]``, in that order, to out_values and out_ids."""
    for i in range(n):
        place = place_of(keys[i])
        out_values[i] = values[place]
        out_ids[i] = ids[place]
    return n


# --- sums ------------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def tree_sum(x, n, partial):
    """The sum of ``x[:n]``, n > 0; ``partial`` holds at least ceil(n / 256) float32 values.

    Each chunk of 256 consecutive entries is added in 32 lanes, lane j adding the entries j, j + 32, ... in turn, and
    the lanes are folded in halves (j with j + 16, then + 8, 4, 2, 1).  The chunk sums are added in the same way
    until one value remains.  Missing entries count as 0.
    """
    lanes = np.empty(LANES, f32)
    source = x
    while True:
        chunks = (n + CHUNK - 1) // CHUNK
        for chunk in range(chunks):
            start = chunk * CHUNK
            for j in range(LANES):
                lanes[j] = _ZERO
            if start + CHUNK <= n:
                for first in range(start, start + CHUNK, LANES):
                    row = source[first : first + LANES]
                    for j in range(LANES):
                        lanes[j] += row[j]
            else:
                for i in range(start, n):
                    lanes[(i - start) % LANES] += source[i]
            partial[chunk] = fold(lanes, LANES)
        if chunks == 1:
            return partial[0]
        source = partial
        n = chunks


@njit(cache=True, error_model="numpy")
def softmax_weights(values, n, top, weights):
    """``weights[i] = exp(values[i] - top)``: the softmax before its division; at most 1 when top is the largest value."""
    for i in range(n):
        weights[i] = exp(values[i] - top)


@njit(cache=True, error_model="numpy")
def reach(weights, keys, n, target, beyond):
    """How many entries, taken in the order of ``keys[:n]``, it takes for the running total of their weights to be at
    least ``target`` (``beyond`` False) or above it (True); 0 if all n do not suffice."""
    done = _ZERO
    running = _ZERO
    for i in range(n):
        if i % CHUNK == 0:
            done = done + running
            running = _ZERO
        running = running + weights[place_of(keys[i])]
        total = done + running
        if total > target or (total == target and not beyond):
            return i + 1
    return 0


@njit(cache=True, error_model="numpy")
def nucleus(order, least, weights, n, target, beyond, keys, spare):
    """Put into ``keys`` the shortest prefix of the list, sorted descending by ``order``, whose weights :func:`reach`
    the target, or the whole list if no prefix does; returns its length.

    Most results are short, so the list is sorted only as far as needed: first :data:`FEW` entries, then those whose order
    is at least ``least``, then all.  Each is a prefix of the whole, so the result does not depend on where this stops.
    """
    m = min(n, FEW)
    select(order, n, m, keys)
    kept = reach(weights, keys, m, target, beyond)
    if kept == 0 and m < n:
        m = sort_from(order, n, least, keys, spare)
        kept = reach(weights, keys, m, target, beyond)
    if kept == 0 and m < n:
        m = sort_from(order, n, -_INF, keys, spare)
        kept = reach(weights, keys, m, target, beyond)
    return m if kept == 0 else kept


# --- changes of logits, in place -------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def permit(logits, mask):
    """``logits[i] = -inf`` where bit i of ``mask`` is 0; ``mask`` is uint32 [at least ceil(n_vocab / 32)], the lowest bit of
    a word first."""
    for first in range(0, logits.size, 32):
        word = mask[first // 32]
        if word == u32(0xFFFFFFFF):
            continue
        # Without a branch, because neighbours are as likely to differ as not.
        part = logits[first : min(first + 32, logits.size)]
        for i in range(part.size):
            part[i] = part[i] if word >> u32(i) & u32(1) else -_INF


@njit(cache=True, error_model="numpy")
def add_bias(logits, ids, bias):
    """``logits[ids[i]] += bias[i]``; ids are distinct."""
    for i in range(ids.size):
        logits[ids[i]] = logits[ids[i]] + bias[i]


@njit(cache=True, error_model="numpy")
def penalize(logits, recent, counts, repeat, frequency, presence):
    """Penalize the tokens in ``recent`` (int64), each once, whatever their order: a positive logit is divided by
    ``repeat``, any other multiplied by it, then ``frequency`` * occurrences + ``presence`` is subtracted.

    Source: Keskar et al. 2019 for ``repeat`` (multiplying negative logits is llama.cpp's correction), the OpenAI API
    for the other two.  ``counts`` is int32 [n_vocab], all 0 before and after the call.
    """
    for i in range(recent.size):
        counts[recent[i]] += i32(1)
    for i in range(recent.size):
        token = recent[i]
        if counts[token] > 0:
            penalty = fma(f32(counts[token]), frequency, presence)
            counts[token] = i32(0)
            x = logits[token]
            logits[token] = x / repeat - penalty if x > _ZERO else fma(x, repeat, -penalty)


# --- filters: each reads a list of n entries, writes a list, and returns its length ----------------------------


@njit(cache=True, error_model="numpy")
def top_k(values, ids, n, k, keys, spare, out_values, out_ids):
    """The k largest entries, sorted descending; all entries, sorted, if there are no more than k."""
    k = min(n, k)
    if k > FEW:
        sort_from(values, n, -_INF, keys, spare)
    else:
        select(values, n, k, keys)
    return gather(values, ids, keys, k, out_values, out_ids)


@njit(cache=True, error_model="numpy")
def typical(values, ids, n, p, weights, scores, partial, keys, spare, out_values, out_ids):
    """Locally typical sampling: the fewest entries, nearest first, whose information content is nearest the entropy and
    whose probabilities add up to more than p; ties by place.  Source: Meister et al. 2022.

    With d = logit - max and Z = sum exp d, the content is log Z - d and the entropy is log Z - sum(d exp d) / Z, so
    the entries are sorted by the distance of d from its mean, and no logarithm is needed.
    """
    top = values[argmax(values, n)]
    softmax_weights(values, n, top, weights)
    total = tree_sum(weights, n, partial)
    for i in range(n):
        # An entry of weight 0 adds nothing to the mean, not even when d is -inf.
        scores[i] = fma(weights[i], values[i] - top, _ZERO) if weights[i] > _ZERO else _ZERO
    mean = tree_sum(scores, n, partial) / total
    for i in range(n):
        scores[i] = -abs((values[i] - top) - mean)
    kept = nucleus(scores, -_INF, weights, n, p * total, True, keys, spare)
    for i in range(n):
        weights[i] = _ZERO
    for i in range(kept):
        weights[place_of(keys[i])] = f32(1.0)
    m = i64(0)
    for i in range(n):
        if weights[i] > _ZERO:
            keys[m] = pack(values[i], i)
            m += 1
    sort_keys(keys, spare, kept)
    return gather(values, ids, keys, kept, out_values, out_ids)


@njit(cache=True, error_model="numpy")
def top_p(values, ids, n, p, weights, partial, keys, spare, out_values, out_ids):
    """Nucleus sampling: the fewest entries, most probable first, whose probabilities add up to at least p.
    Source: Holtzman et al. 2019."""
    top = values[argmax(values, n)]
    softmax_weights(values, n, top, weights)
    total = tree_sum(weights, n, partial)
    # Entries whose weight is below this make up less than half of 1 - p even if all are that small.
    least = top + log((f32(1.0) - p) * total / f32(2 * n))
    kept = nucleus(values, least, weights, n, p * total, False, keys, spare)
    return gather(values, ids, keys, kept, out_values, out_ids)


@njit(cache=True, error_model="numpy")
def min_p(values, ids, n, log_p, out_values, out_ids):
    """The entries at least p times as probable as the most probable one, in the order of the list; ``log_p`` is
    log(p).  Source: Nguyen et al. 2024."""
    least = values[argmax(values, n)] + log_p
    kept = 0
    for i in range(n):
        if values[i] >= least:
            out_values[kept] = values[i]
            out_ids[kept] = ids[i]
            kept += 1
    return kept


# --- the draw, and what was drawn ------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def draw(values, ids, n, temperature, seed, position):
    """The token with the largest logit / temperature + gumbel(seed, position, token), ties to the lower id: a sample
    of softmax(logit / temperature)."""
    best = -_INF
    token = i64(ids[0])
    for i in range(n):
        x = values[i] / temperature
        # The noise of v = uniform(...) is below -log(v), and so below m ln 2 where v >= 2**-m.  Rounding is monotonic,
        # so an entry that cannot become the largest under this bound is skipped before any logarithm is taken.
        m = i32(127) - (float_bits(uniform(seed, position, ids[i])) >> i32(23))
        if fma(f32(m), _LN2_ABOVE, x) < best:
            continue
        x = x + gumbel(seed, position, ids[i])
        if x > best or (x == best and i64(ids[i]) < token):
            best = x
            token = i64(ids[i])
    return token


@njit(cache=True, error_model="numpy")
def log_softmax(logits, weights, partial):
    """(max, log of the sum of exp(logit - max)) of a whole vocabulary, in the order of token ids: the log-probability
    of a token is (its logit - the first) - the second."""
    n = logits.size
    top = logits[argmax(logits, n)]
    softmax_weights(logits, n, top, weights)
    return top, log(tree_sum(weights, n, partial))
