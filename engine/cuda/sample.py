"""Sampling on the GPU: the tokens that ``engine/sampling/sampler.py`` chooses, bit for bit, without the host.

Formula: ``engine/cpu/sample.py``: bias, penalties, then the largest logit, or top-k, top-p, min-p, temperature and noise.
    The order is that of the packed keys there (larger logit, then lower id; NaN above all).  Keys are all different, so which
    k are the largest does not depend on how they are found.
Shapes: up to 128 rows of logits float32 [n_vocab], one every ``stride``, of one or more answers.  Row r is for the token
    after positions[r * every] of the answer in slot sequences[r * every], both int32: ``every`` is 1, or the number of rows
    per answer of a draft model's pass of which only the last is sampled.  By slot: history int32 [slots, n_ctx], token by
    position; params, one :data:`PARAMS` each.  best uint64 [rows][1024]; found int32 [rows], the tokens, or why there is
    none.  With ``keep``, the candidates from which row r was drawn: ids int32 and probabilities float32 [16][256], counts
    int32 [16], in row places[r] + draft, if that is less than places[r + 1].
    If several owners have some columns each, ``maxima`` sees those of one, of which the first is token ``first``, and best
    uint64 [rows][groups] has the groups of all owners.
Who owns what: ``edit``: a block per row, a thread per biased or recent token.  ``maxima``: the vocabulary is cut into lines
    of 32 logits, line l belongs to group l % groups, a group to a warp.  ``argmax``, ``draw``: a block per row, a thread per
    group, then per candidate.
Reduction order: that of ``tree_sum`` and ``reach`` for at most 256 entries: lane j adds entries j, j + 32, ..., the lanes are
    folded in halves, and running totals are added one by one.
Bytes moved: 4 n_vocab per row by ``maxima``; ``draw`` reads the groups of about k candidates again.

``engine/cuda/accept.py`` processes the tokens further.  Slots are read early: what writes them has ended when a pass begins.

The k largest keys are in the k groups with the largest maxima: every other group has k maxima above all its keys.  So
``draw`` finds a bound that at least k maxima reach, collects what reaches it in their groups, a few more than k, and ranks
these.  If an unusual order of the logits leaves more than 1024, the bound is raised by counting the whole vocabulary.
"""

import math

import numpy as np
from numba import cuda, njit

from engine.cpu.sample import pack, place_of
from engine.cuda.accept import MOST_K, P_ACCEPT, PARAMS_WORDS, SEED, warp_max
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import advance, bits_float, exp, fma, gumbel, let_next_begin, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U64P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
i64 = np.int64
u32 = np.uint32
u64 = np.uint64
I = np.int32  # noqa: E741

GROUPS = 1024
"""Groups of the vocabulary, and threads of the block that chooses among them."""
WARPS = 8
"""Warps of a block of ``maxima``."""
OWNED_GROUPS = 256
"""The most groups of the vocabulary if several owners have some columns each and only the largest logit is wanted."""
EDIT_THREADS = 256
MOST_RECENT = 1024
"""The largest repeat_last_n."""
MOST_BIAS = 1024
"""The most entries of logit_bias."""

NAN, INFINITE, BANNED = -1, -2, -3
"""Stored in place of a token when there is none, because the largest logit is NaN, +inf or -inf."""

PARAMS = np.dtype(
    [
        ("seed", "<u8"),
        ("p_accept", "<f4"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),  # inf: off
        ("log_min_p", "<f4"),  # -inf: off
        ("repeat", "<f4"),
        ("frequency", "<f4"),
        ("presence", "<f4"),
        ("top_k", "<i4"),
        ("last_n", "<i4"),  # 0: no penalties
        ("n_bias", "<i4"),
        ("bias_ids", "<i4", (MOST_BIAS,)),
        ("bias", "<f4", (MOST_BIAS,)),
    ]
)
"""Everything about a choice except the history.  Kernels read it as 32-bit words, so a captured graph works with any values;
its first words are those that ``engine/cuda/accept.py`` reads."""


def _word(field: str) -> int:
    return int(PARAMS.fields[field][1]) // 4  # type: ignore[index]


assert (_word("seed"), _word("p_accept"), PARAMS.itemsize // 4) == (SEED, P_ACCEPT, PARAMS_WORDS)
_TEMPERATURE, _TOP_P, _LOG_MIN_P = map(_word, ("temperature", "top_p", "log_min_p"))
_REPEAT, _FREQUENCY, _PRESENCE = map(_word, ("repeat", "frequency", "presence"))
_TOP_K, _LAST_N, _N_BIAS, _BIAS_IDS, _BIAS = map(_word, ("top_k", "last_n", "n_bias", "bias_ids", "bias"))

FINITE = u64(0x00800000) << u64(32)
"""The smallest key of a logit above -inf."""

_BATCH = 8  # loads of a lane in flight at once; 8 x 1024 lines are 262144 logits
_IN_GROUPS, _FOUND, _ABOVE = 0, 1, 2  # counters of draw


# --- keys ------------------------------------------------------------------------------------------------------


@njit
def value_of(key):
    """The float32 from which ``pack`` made a key; +0 for -0."""
    order = I(i64(key >> u64(32)) - i64(0x80000000))
    return bits_float(I(order ^ ((order >> I(31)) & I(0x7FFFFFFF))))


@njit
def found_of(key, token):
    """The result for a row whose largest logit has this key: the token, or why there is none."""
    value = value_of(key)
    found = I(token)
    if value == f32(-math.inf):
        found = I(BANNED)
    if value == f32(math.inf):
        found = I(INFINITE)
    if value != value:
        found = I(NAN)
    return found


# --- changes of logits -----------------------------------------------------------------------------------------


@kernel(F32P, i32, I32P, I32P, i32, I32P, I32P, i32, threads=EDIT_THREADS)
def edit(threads: int) -> KernelCode:
    """Apply bias and penalties in place; see ``add_bias`` and ``penalize`` of the mirror.  Grid: rows."""

    @cuda.jit
    def edit(rows, stride, all_params, histories, n_ctx, sequences, positions, every):
        let_next_begin()
        recent = cuda.shared.array(MOST_RECENT, np.int32)
        thread = I(cuda.threadIdx.x)
        row = I(cuda.blockIdx.x)
        logits = advance(rows, I(row * stride))
        slot = sequences[row * every]
        params = advance(all_params, I(slot * PARAMS_WORDS))
        history = advance(histories, I(slot * n_ctx))
        wait_for_inputs()
        i = thread
        while i < params[_N_BIAS]:
            token = params[_BIAS_IDS + i]
            logits[token] = logits[token] + bits_float(params[_BIAS + i])
            i = I(i + threads)
        length = min(I(positions[row * every] + 1), n_ctx)
        n = min(params[_LAST_N], length)
        i = thread
        while i < n:
            recent[i] = history[length - n + i]
            i = I(i + threads)
        # From here on, all biases have been added.
        cuda.syncthreads()
        i = thread
        while i < n:
            token = recent[i]
            earlier = I(0)
            j = I(0)
            while j < i:
                earlier = I(earlier + I(recent[j] == token))
                j = I(j + 1)
            # The first occurrence represents all.
            if earlier == 0:
                count = I(0)
                while j < n:
                    count = I(count + I(recent[j] == token))
                    j = I(j + 1)
                penalty = fma(f32(count), bits_float(params[_FREQUENCY]), bits_float(params[_PRESENCE]))
                repeat = bits_float(params[_REPEAT])
                x = logits[token]
                logits[token] = x / repeat - penalty if x > f32(0.0) else fma(x, repeat, -penalty)
            i = I(i + threads)

    return edit


# --- the largest -----------------------------------------------------------------------------------------------


@kernel(F32P, i32, i32, i32, U64P, threads=32 * WARPS)
def maxima(groups: int, warps: int) -> KernelCode:
    """best[r][g] = the largest key of group g in row r, or 0 if the group is empty; column i is token first + i.

    Grid: groups / warps, rows."""
    lines = groups * _BATCH

    @cuda.jit
    def maxima(rows, stride, n, first, best):
        let_next_begin()
        x = cuda.local.array(_BATCH, np.float32)
        lane = I(cuda.threadIdx.x & 31)
        group = I(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5))
        logits = advance(rows, I(I(cuda.blockIdx.y) * stride))
        largest = u64(0)
        wait_for_inputs()
        place = I(32 * group + lane)
        while place < n:
            # All loads are issued before the first result is needed; past the end, a lane loads its own first logit again.
            for b in range(_BATCH):
                other = I(place + 32 * groups * b)
                x[b] = logits[other if other < n else place]
            for b in range(_BATCH):
                other = I(place + 32 * groups * b)
                largest = max(largest, pack(x[b], I(first + (other if other < n else place))))
            place = I(place + 32 * lines)
        largest = warp_max(largest)
        if lane == 0:
            best[I(cuda.blockIdx.y) * groups + group] = largest

    return maxima


def owned_groups(n_owners: int) -> int:
    """The groups of each of ``n_owners`` owners of columns: a power of two, at least a warp of ``argmax``."""
    return max(32, OWNED_GROUPS >> (n_owners - 1).bit_length())


@kernel(U64P, I32P, threads=GROUPS, blocks=1)
def argmax(groups: int) -> KernelCode:
    """Choose the largest key of all groups as the token.  Grid: rows, of as many threads as there are groups."""
    warps = groups // 32

    @cuda.jit
    def argmax(best, found):
        let_next_begin()
        keys = cuda.shared.array(32, np.uint64)
        thread = I(cuda.threadIdx.x)
        row = I(cuda.blockIdx.x)
        wait_for_inputs()
        key = warp_max(best[row * groups + thread])
        if thread & 31 == 0:
            keys[thread >> 5] = key
        cuda.syncthreads()
        if thread < 32:
            key = warp_max(keys[thread] if thread < warps else u64(0))
            if thread == 0:
                found[row] = found_of(key, place_of(key))

    return argmax


# --- a draw ----------------------------------------------------------------------------------------------------


@device
def offer(key, least, keys, counters):
    """Add a key that is not below ``least`` to ``keys``, in any order; keys that do not fit are also counted."""
    if key >= least:
        at = cuda.atomic.add(counters, _FOUND, I(1))
        if at < keys.size:
            keys[at] = key


@device
def raise_bound(logits, n_vocab, k, most, least, counters):
    """A bound that at least k and at most ``most`` keys of the vocabulary reach, given a lower one that k keys reach."""
    thread = I(cuda.threadIdx.x)
    bound = u64(0)
    count = n_vocab
    bit = 63
    while count > most:
        middle = bound | (u64(1) << u64(bit))
        bit -= 1
        if middle <= least:
            bound = middle
            continue
        cuda.syncthreads()
        if thread == 0:
            counters[_ABOVE] = I(0)
        cuda.syncthreads()
        mine = I(0)
        i = thread
        while i < n_vocab:
            mine = I(mine + I(pack(logits[i], i) >= middle))
            i = I(i + cuda.blockDim.x)
        cuda.atomic.add(counters, _ABOVE, mine)
        cuda.syncthreads()
        if counters[_ABOVE] >= k:
            bound = middle
            count = counters[_ABOVE]
    return bound


@kernel(F32P, i32, i32, U64P, I32P, I32P, I32P, i32, I32P, I32P, i32, I32P, F32P, I32P, threads=GROUPS, blocks=1)
def draw(groups: int, keep: bool) -> KernelCode:
    """Draw a token by top-k, top-p, min-p, temperature and noise.  Grid: rows, of as many threads as there are groups.

    With ``keep``, the candidates and their probabilities are also stored, as computed by ``probabilities`` of
    ``engine/cpu/accept.py``; none for a row that cannot be sampled.
    """
    warps = groups // 32
    most_k = min(MOST_K, groups)
    per_lane = most_k // 32
    lines = groups * _BATCH

    @cuda.jit
    def draw(
        rows,
        stride,
        n_vocab,
        best,
        all_params,
        sequences,
        positions,
        every,
        found,
        places,
        draft,
        ids,
        probabilities,
        counts,
    ):
        let_next_begin()
        keys = cuda.shared.array(groups, np.uint64)
        ordered = cuda.shared.array(most_k, np.uint64)
        weights = cuda.shared.array(most_k, np.float32)
        chosen = cuda.shared.array(groups, np.int32)
        counters = cuda.shared.array(3, np.int32)
        x = cuda.local.array(_BATCH, np.float32)
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        row = I(cuda.blockIdx.x)
        logits = advance(rows, I(row * stride))
        params = advance(all_params, I(sequences[row * every] * PARAMS_WORDS))
        if thread < 3:
            counters[thread] = I(0)
        wait_for_inputs()
        k = min(min(params[_TOP_K], n_vocab), I(most_k))
        position = I(positions[row * every] + 1)

        # A bound that at least k of the maxima reach, and not many more.
        mine = best[row * groups + thread]
        finite = I(cuda.syncthreads_count(I(mine >= FINITE)))
        least = u64(0)
        count = min(I((n_vocab + 31) >> 5), I(groups))
        enough = I(k + (k >> 2) + 8)
        bit = 63
        while count > enough and bit >= 0:
            middle = least | (u64(1) << u64(bit))
            reached = I(cuda.syncthreads_count(I(mine >= middle)))
            if reached >= k:
                least = middle
                count = reached
            bit -= 1
        # A mask leaves -inf nearly everywhere.  It is never drawn beside another logit, so it need not be collected.
        if not keep and finite > 0:
            least = max(least, FINITE)

        # The keys that reach it, in any order.
        cuda.syncthreads()
        if mine >= least and mine > u64(0):
            chosen[cuda.atomic.add(counters, _IN_GROUPS, I(1))] = thread
        cuda.syncthreads()
        i = I(thread >> 5)
        while i < counters[_IN_GROUPS]:
            first = chosen[i]
            while 32 * first < n_vocab:
                for b in range(_BATCH):
                    x[b] = logits[min(I(32 * (first + b * groups) + lane), I(n_vocab - 1))]
                for b in range(_BATCH):
                    place = I(32 * (first + b * groups) + lane)
                    if place < n_vocab:
                        offer(pack(x[b], place), least, keys, counters)
                first = I(first + lines)
            i = I(i + warps)
        cuda.syncthreads()
        if counters[_FOUND] > groups:
            least = raise_bound(logits, n_vocab, k, groups, least, counters)
            cuda.syncthreads()
            if thread == 0:
                counters[_FOUND] = I(0)
            cuda.syncthreads()
            i = thread
            while i < n_vocab:
                offer(pack(logits[i], i), least, keys, counters)
                i = I(i + groups)
            cuda.syncthreads()

        # The first k of them, sorted.
        n = counters[_FOUND]
        k = min(k, n)
        if thread < n:
            key = keys[thread]
            rank = I(0)
            i = I(0)
            while i < n:
                rank = I(rank + I(keys[i] > key))
                i = I(i + 1)
            if rank < k:
                ordered[rank] = key
        cuda.syncthreads()

        # top-p: the fewest that reach p of the total; the list is sorted, so each thread can compute its own running total.
        largest = ordered[0]
        top = value_of(largest)
        value = f32(-math.inf)
        token = I(0)
        if thread < k:
            value = value_of(ordered[thread])
            token = I(place_of(ordered[thread]))
        if thread < most_k:
            weights[thread] = exp(value - top) if thread < k else f32(0.0)
        cuda.syncthreads()
        total = f32(0.0)
        for i in range(per_lane):
            total = total + weights[32 * i + lane]
        target = bits_float(params[_TOP_P]) * fold32(total)
        running = f32(0.0)
        if thread < k:
            i = I(0)
            while i <= thread:
                running = running + weights[i]
                i = I(i + 1)
        kept = min(I(1 + cuda.syncthreads_count(I(thread < k and running < target))), k)

        # min-p
        likely = thread < kept and value >= top + bits_float(params[_LOG_MIN_P])
        kept = I(cuda.syncthreads_count(I(likely)))

        # The largest after adding the noise.
        if thread < most_k:
            key = u64(0)
            if thread < kept:
                seed = u64(u32(params[SEED])) | (u64(u32(params[SEED + 1])) << u64(32))
                noise = gumbel(seed, position, token)
                key = pack(value / bits_float(params[_TEMPERATURE]) + noise, token)
            keys[thread] = key
            # The block has been synchronized since the weights were read.
            if keep:
                weights[thread] = exp((value - top) / bits_float(params[_TEMPERATURE])) if thread < kept else f32(0.0)
        cuda.syncthreads()
        if thread < 32:
            key = u64(0)
            for i in range(per_lane):
                key = max(key, keys[32 * i + lane])
            key = warp_max(key)
            if thread == 0:
                found[row] = found_of(largest, place_of(key))
        if keep:
            total = f32(0.0)
            for i in range(per_lane):
                total = total + weights[32 * i + lane]
            total = fold32(total)
            at = I(places[row] + draft)
            # The target's step may have rows for fewer drafts of this answer than are made.
            if at < places[row + 1]:
                if thread < kept:
                    ids[MOST_K * at + thread] = token
                    probabilities[MOST_K * at + thread] = weights[thread] / total
                if thread == 0:
                    counts[at] = kept if found_of(largest, 0) >= 0 else I(0)

    return draw
