"""The end of a step on the GPU: which drafts are kept and where the next step begins; and the start of drafting.

Formula: ``engine/cpu/accept.py``.  A step has processed ``rows`` tokens: tokens[0], which is certain, and the drafts after
    it, tokens[i] at positions[i] = p + i.  Row i predicts position p + i + 1: found[i], and a list of candidates.  The
    drafts are checked in order until one is rejected, so a step with n accepted drafts yields n + 1 tokens; the last of
    them is the certain token of the next step.
Shapes: found, tokens, positions int32 [16]; history int32 [n_ctx], token by position; step int32 [1], the number of steps
    that have ended; ring int32 [slots][32], slots a power of two, pinned memory of the host, also seen as ``pairs``
    uint64: words 1 .. of a slot are a step's tokens, word 0 their number, or :data:`EMPTY` before that.  params: words,
    the seed (low, high), then the float32 p_accept.  Lists: ids int32 and probabilities float32 [16][256], counts int32
    [16]; row i of the drafts' lists belongs to tokens[i + 1], and a count of 0 says that this draft is certain.
Who owns what: one block.  Exact acceptance: one warp, lane i owns row i.  Otherwise 256 threads; thread j compares candidate
    j of every list, and then owns candidate j of the rejected row.
Reduction order: none, only maxima and a first index.
Bytes moved: a few hundred; with lists, 8 x 256 for each.

The host sees a step when word 0 changes.  A step of one token, the only kind in plain decoding, is a single store of 8 bytes
and so needs no fence: over a bus, a fence takes as long as everything else.
"""

import numpy as np
from numba import cuda

from engine.cpu.accept import ACCEPT_SEED, RESAMPLE_SEED
from engine.cpu.sample import pack, place_of
from engine.cuda.intrinsics import (
    bits_float,
    gumbel,
    lane_xor_int,
    let_next_begin,
    log,
    uniform,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U64P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.limits import MOST_DRAFTS

f32 = np.float32
u32 = np.uint32
u64 = np.uint64
I = np.int32  # noqa: E741

MOST_ROWS = MOST_DRAFTS + 1
"""Rows of the largest step."""
MOST_K = 256
"""Entries of the longest list of candidates, and the number of threads that examine one."""
SLOT = 32
"""Words of a slot of the ring."""
EMPTY = -(2**31)
"""Word 0 of a slot that has not been written."""

SEED, P_ACCEPT = 0, 2
"""Offsets, in words of 32 bits, of what acceptance reads from the parameters of a sampler."""

_STEP = (I32P, i32, i32, I32P, I32P, I32P, I32P, U64P, i32, I32P)
_LISTS = (I32P, F32P, I32P)


# --- reductions ------------------------------------------------------------------------------------------------


@device
def warp_max(key):  # type: ignore[no-untyped-def]
    """The largest uint64 of a warp's lanes, in every lane."""
    for step in range(5):
        lane = I(16) >> I(step)
        high = u32(lane_xor_int(I(key >> u64(32)), lane))
        low = u32(lane_xor_int(I(u32(key & u64(0xFFFFFFFF))), lane))
        key = max(key, (u64(high) << u64(32)) | u64(low))
    return key


@device
def first_refused(stays):  # type: ignore[no-untyped-def]
    """The lowest lane of a warp whose ``stays`` is false, in every lane; there must be such a lane."""
    lane = I(cuda.threadIdx.x & 31)
    first = I(31) if stays else lane
    for step in range(5):
        first = min(first, lane_xor_int(first, I(16) >> I(step)))
    return first


# --- acceptance ------------------------------------------------------------------------------------------------


@device
def end_step(mine, n, p, done, n_ctx, tokens, positions, history, ring, pairs, slots, step):  # type: ignore[no-untyped-def]
    """Commit a step whose tokens are the ``mine`` of lanes 0 .. n.  One warp calls it, when no thread reads the inputs any
    more.

    A row that cannot be sampled passes token 0 to whatever runs next, and its reason to the host.  Positions stop at the
    end of the context, so that steps started beyond it stay inside the cache.
    """
    lane = I(cuda.threadIdx.x)
    slot = I(done & (slots - 1))
    at = I(p + 1 + lane)
    if lane <= n:
        token = max(mine, I(0))
        if at < n_ctx:
            history[at] = token
        if lane == n:
            tokens[0] = token
        if lane > 0:
            ring[slot * SLOT + 1 + lane] = mine
    if lane < MOST_ROWS and p + 1 + n < n_ctx:
        positions[lane] = I(at + n)
    if n > 0:
        cuda.threadfence_system()
        cuda.syncwarp()
    if lane == 0:
        pairs[slot * (SLOT // 2)] = u64(u32(n + 1)) | (u64(u32(mine)) << u64(32))
        step[0] = I(done + 1)


@kernel(*_STEP, I32P, *_LISTS, *_LISTS, threads=MOST_K)
def accept(mode: str) -> KernelCode:
    """The end of a step, after ``argmax`` or ``draw``.  Grid: 1 block, of a warp if ``mode`` is "exact" and of
    :data:`MOST_K` threads otherwise.  Exact acceptance reads no parameters and no lists; p-min reads no draft lists."""
    return _accept_exact() if mode == "exact" else _accept_listed(mode == "ratio")


def _accept_exact() -> DeviceFunction:
    most_drafts = MOST_ROWS - 1

    @cuda.jit
    def accept(  # type: ignore[no-untyped-def]
        found, rows, n_ctx, tokens, positions, history, ring, pairs, slots, step, params, ids, p, n_p, other_ids, q, n_q
    ):
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        wait_for_inputs()
        mine = found[min(lane, I(most_drafts))]
        draft = tokens[min(lane + 1, I(most_drafts))]
        first = positions[0]
        done = step[0]
        n = I(0)
        if rows > 1:
            n = first_refused(lane < rows - 1 and mine == draft)
        # Every lane has read what some lanes are about to write.
        cuda.syncwarp()
        end_step(mine, n, first, done, n_ctx, tokens, positions, history, ring, pairs, slots, step)

    return accept


def _accept_listed(ratio: bool) -> DeviceFunction:
    warps = MOST_K // 32
    most_drafts = MOST_ROWS - 1

    @cuda.jit
    def accept(  # type: ignore[no-untyped-def]
        found, rows, n_ctx, tokens, positions, history, ring, pairs, slots, step, params, ids, p, n_p, other_ids, q, n_q
    ):
        let_next_begin()
        drafts = cuda.shared.array(MOST_ROWS, np.int32)
        sizes = cuda.shared.array(MOST_ROWS, np.int32)
        other_sizes = cuda.shared.array(MOST_ROWS, np.int32)
        places = cuda.shared.array(MOST_ROWS, np.int32)
        other_places = cuda.shared.array(MOST_ROWS, np.int32)
        others = cuda.shared.array(MOST_K, np.int32)
        q_others = cuda.shared.array(MOST_K, np.float32)
        keys = cuda.shared.array(warps, np.uint64)
        accepted = cuda.shared.array(1, np.int32)
        candidates = cuda.local.array(most_drafts, np.int32)
        other_candidates = cuda.local.array(most_drafts, np.int32)
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        wait_for_inputs()

        # All loads are issued before the first result is needed; past the last draft, its list is loaded again.
        last = max(I(rows - 2), I(0))
        for i in range(most_drafts):
            candidates[i] = ids[MOST_K * min(I(i), last) + thread]
            if ratio:
                other_candidates[i] = other_ids[MOST_K * min(I(i), last) + thread]
        first = positions[0]
        done = step[0]
        seed = u64(u32(params[SEED])) | (u64(u32(params[SEED + 1])) << u64(32))
        if thread < MOST_ROWS:
            drafts[thread] = tokens[min(thread + 1, I(most_drafts))]
            sizes[thread] = n_p[thread]
            places[thread] = I(-1)
            if ratio:
                other_sizes[thread] = n_q[thread]
                other_places[thread] = I(-1)
        cuda.syncthreads()
        for i in range(most_drafts):
            if i <= last:
                if thread < sizes[i] and candidates[i] == drafts[i]:
                    places[i] = thread
                if ratio and thread < other_sizes[i] and other_candidates[i] == drafts[i]:
                    other_places[i] = thread
        cuda.syncthreads()
        if thread < 32:
            stays = False
            if lane < rows - 1:
                x = drafts[lane]
                drawn = found[lane]
                p_x = p[MOST_K * lane + places[lane]] if places[lane] >= 0 else f32(0.0)
                if ratio:
                    q_x = f32(1.0) if other_sizes[lane] == 0 else f32(0.0)
                    if other_places[lane] >= 0:
                        q_x = q[MOST_K * lane + other_places[lane]]
                    u = uniform(seed ^ ACCEPT_SEED, I(first + 1 + lane), x)
                    stays = drawn >= 0 and u * q_x < p_x
                else:
                    stays = drawn >= 0 and (x == drawn or p_x >= bits_float(params[P_ACCEPT]))
            n = first_refused(stays)
            if lane == 0:
                accepted[0] = n
        cuda.syncthreads()
        n = accepted[0]
        word = found[n]
        if ratio and n < rows - 1 and word >= 0:
            # The draw that replaces the rejected draft.
            size = sizes[n]
            other_size = other_sizes[n]
            at = I(MOST_K * n + thread)
            token = I(0)
            share = f32(0.0)
            if thread < size:
                token = ids[at]
                share = p[at]
            if thread < other_size:
                others[thread] = other_ids[at]
                q_others[thread] = q[at]
            cuda.syncthreads()
            other = f32(1.0) if other_size == 0 and token == drafts[n] else f32(0.0)
            i = I(0)
            while i < other_size:
                if others[i] == token:
                    other = q_others[i]
                i = I(i + 1)
            rest = share - other
            nothing = cuda.syncthreads_count(I(thread < size and rest > f32(0.0))) == 0
            if not nothing:
                share = rest
            key = u64(0)
            if thread < size and (nothing or share > f32(0.0)):
                noise = gumbel(seed ^ RESAMPLE_SEED, I(first + 1 + n), token)
                key = pack(log(share) + noise, token)
            key = warp_max(key)
            if lane == 0:
                keys[thread >> 5] = key
            cuda.syncthreads()
            if thread < 32:
                word = I(place_of(warp_max(keys[lane] if lane < warps else u64(0))))
        if thread < 32:
            mine = drafts[lane & most_drafts] if lane < n else I(word)
            end_step(mine, n, first, done, n_ctx, tokens, positions, history, ring, pairs, slots, step)

    return accept


# --- drafts ----------------------------------------------------------------------------------------------------


@kernel(I32P, i32, i32, I32P, I32P, I32P, I32P, I32P, threads=32)
def propose(scripted: bool) -> KernelCode:
    """The end of a draft model's step: its token becomes its next input and ``out[0]``, a draft in the target's step.

    ``last``: the row that was sampled, whose token is found[0]; ``tokens``, ``positions``: the draft model's; ``script``
    int32 [n_ctx]: if ``scripted``, the token proposed for a position instead of the model's own, unless negative.
    Grid: 1 block of a warp, whose first lane does all the work.
    """

    @cuda.jit
    def propose(found, last, n_ctx, tokens, positions, history, script, out):  # type: ignore[no-untyped-def]
        let_next_begin()
        wait_for_inputs()
        if cuda.threadIdx.x == 0:
            token = max(found[0], I(0))
            position = I(positions[last] + 1)
            if scripted and position < n_ctx and script[position] >= 0:
                token = script[position]
            tokens[0] = token
            positions[0] = position
            out[0] = token
            if position < n_ctx:
                history[position] = token

    return propose


@kernel(I32P, I32P, I32P, I32P, I32P, threads=32)
def begin_draft(rows: int, anchored: bool) -> KernelCode:
    """The first inputs of a draft model in a step: the last ``rows`` tokens up to the target's certain one, at
    target_positions[0], which must be at least rows - 1.  If ``anchored``, that position and the one before it are written to
    anchor int32 [2].  Grid: 1 block of a warp."""

    @cuda.jit
    def begin_draft(target_positions, history, tokens, positions, anchor):  # type: ignore[no-untyped-def]
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        wait_for_inputs()
        if lane < rows:
            position = I(target_positions[0] - (rows - 1) + lane)
            tokens[lane] = history[position]
            positions[lane] = position
        if anchored and lane < 2:
            anchor[lane] = I(target_positions[0] - lane)

    return begin_draft


@kernel(I32P, i32, i32, I32P, I32P, I32P, threads=32)
def place() -> KernelCode:
    """Copy n drafts that the host has chosen, ``drafts`` int32 [n] in its pinned memory, into the target's step.
    Grid: 1 block of a warp."""

    @cuda.jit
    def place(drafts, n, n_ctx, tokens, positions, history):  # type: ignore[no-untyped-def]
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        wait_for_inputs()
        if lane < n:
            token = drafts[lane]
            at = I(positions[0] + 1 + lane)
            tokens[1 + lane] = token
            if at < n_ctx:
                history[at] = token

    return place
