"""The end of a step on the GPU: which drafts are kept and where the next step begins; and the start of drafting.

Formula: ``engine/cpu/accept.py``.  A step has up to 128 rows, those of one or more *entries*, the answers in it: entry e owns
    rows starts[e] .. starts[e + 1] - 1, its last sampled token and the drafts after it, tokens[i] at positions p + i.  Row i
    of them predicts position p + i + 1: found[i], and a list of candidates.  The drafts are checked in order until one is
    rejected, so an entry with n accepted drafts yields n + 1 tokens; the last of them is its last sampled token in the next
    step.  An entry without rows is padding: nothing is written for it.  An entry has up to 16 rows, and so has a step with
    lists.
Shapes: found, tokens, positions, sequences int32 [128], by row; sequences: the *slot* of a row's answer, the place of what is
    kept from step to step.  starts int32 [129].  By slot: history int32 [slots, n_ctx], token by position; at int32 [slots],
    the position of the last sampled token; step int32 [slots], the number of steps that have ended; params,
    :data:`PARAMS_WORDS` words each, the seed (low, high), then the float32 p_accept; ring int32 [slots][ring_steps][32],
    ring_steps a power of two, pinned memory of the host, also seen as ``pairs`` uint64: words 1 .. of a part are a step's
    tokens, word 0 their number, or :data:`EMPTY` before that.  Lists: ids int32 and probabilities float32 [16][256], counts
    int32 [16]; row i of the drafts' lists belongs to tokens[i + 1], and a count of 0 says that this draft is certain.
Who owns what: a block per entry, which writes only the entry's rows and its slot.  Exact acceptance: one warp, lane i owns
    row i of the entry.  Otherwise 256 threads; thread j compares candidate j of every list, and then owns candidate j of the
    rejected row.  ``propose``: a thread for each entry.  ``lay_out``: a thread for each row.
Reduction order: none, only maxima and a first index.
Bytes moved: a few hundred per entry; with lists, 8 x 256 for each.

The host writes starts, and the slots of the rows in use, only between launches, so kernels read both early.

The host sees a step when word 0 changes.  A step of one token, the only kind in plain decoding, is a single store of 8 bytes
and so needs no fence: over a bus, a fence takes as long as everything else.
"""

from collections.abc import Sequence

import numpy as np
from numba import cuda

from engine.cpu.accept import ACCEPT_SEED, RESAMPLE_SEED
from engine.cpu.sample import pack, place_of
from engine.cuda.intrinsics import (
    advance,
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
from engine.limits import DECODE_ANSWERS, DECODE_ROWS

f32 = np.float32
u32 = np.uint32
u64 = np.uint64
I = np.int32  # noqa: E741

MOST_K = 256
"""Entries of the longest list of candidates, and the number of threads that examine one."""
RESULT_WORDS = 32
"""Words of a step's part of a ring."""
EMPTY = -(2**31)
"""Word 0 of a part that has not been written."""

SEED, P_ACCEPT, PARAMS_WORDS = 0, 2, 2060
"""Offsets, in words of 32 bits, of what acceptance reads from the parameters of a sampler, and their size."""

_STEP = (I32P, I32P, i32, I32P, I32P, I32P, I32P, I32P, I32P, U64P, i32, I32P)
_LISTS = (I32P, F32P, I32P)


# --- reductions ------------------------------------------------------------------------------------------------


@device
def lane_xor_long(x, lane):
    """The uint64 of the lane of a warp whose number differs in these bits."""
    high = u32(lane_xor_int(I(x >> u64(32)), lane))
    low = u32(lane_xor_int(I(u32(x & u64(0xFFFFFFFF))), lane))
    return (u64(high) << u64(32)) | u64(low)


@device
def warp_max(key):
    """The largest uint64 of a warp's lanes, in every lane."""
    for step in range(5):
        key = max(key, lane_xor_long(key, I(16) >> I(step)))
    return key


@device
def first_refused(stays):
    """The lowest lane of a warp whose ``stays`` is false, in every lane; there must be such a lane."""
    lane = I(cuda.threadIdx.x & 31)
    first = I(31) if stays else lane
    for step in range(5):
        first = min(first, lane_xor_int(first, I(16) >> I(step)))
    return first


# --- acceptance ------------------------------------------------------------------------------------------------


@device
def end_step(mine, n, own, p, done, n_ctx, tokens, positions, history, at_slot, ring, pairs, ring_steps, step):
    """Commit the step of an entry whose tokens are the ``mine`` of lanes 0 .. n and whose next one has ``own`` rows at most.
    One warp calls it, when no thread reads the inputs any more.  All pointers are to the entry's own part.

    A row that cannot be sampled passes token 0 to whatever runs next, and its reason to the host.  Positions stop at the
    end of the context, so that steps started beyond it stay inside the cache.
    """
    lane = I(cuda.threadIdx.x)
    part = I(done & (ring_steps - 1))
    at = I(p + 1 + lane)
    if lane <= n:
        token = max(mine, I(0))
        if at < n_ctx:
            history[at] = token
        if lane == n:
            tokens[0] = token
        if lane > 0:
            ring[part * RESULT_WORDS + 1 + lane] = mine
    if lane < own and p + 1 + n < n_ctx:
        positions[lane] = I(at + n)
    if n > 0:
        cuda.threadfence_system()
        cuda.syncwarp()
    if lane == 0:
        pairs[part * (RESULT_WORDS // 2)] = u64(u32(n + 1)) | (u64(u32(mine)) << u64(32))
        step[0] = I(done + 1)
        if p + 1 + n < n_ctx:
            at_slot[0] = I(p + 1 + n)


@device
def rows_to_place(rows):
    """How many rows of the next step get their positions: those of the entry; if it is alone, all 16, because its next step
    may have more drafts."""
    return I(DECODE_ROWS) if cuda.gridDim.x == 1 else I(rows)


@kernel(*_STEP, I32P, *_LISTS, *_LISTS, threads=MOST_K)
def accept(mode: str) -> KernelCode:
    """The end of a step, after ``argmax`` or ``draw``.  Grid: a block per entry, of a warp if ``mode`` is "exact" and of
    :data:`MOST_K` threads otherwise.  Exact acceptance reads no parameters and no lists; p-min reads no draft lists.

    Entry e writes tokens[starts[e]] and the positions of its own rows; the only entry of a launch, those of all 16 rows.
    """
    return _accept_exact() if mode == "exact" else _accept_listed(mode == "ratio")


def _accept_exact() -> DeviceFunction:
    last_row = DECODE_ANSWERS - 1

    @cuda.jit
    def accept(
        found,
        starts,
        n_ctx,
        tokens,
        positions,
        sequences,
        history,
        certain,
        ring,
        pairs,
        ring_steps,
        step,
        params,
        ids,
        p,
        n_p,
        other_ids,
        q,
        n_q,
    ):
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        start = starts[cuda.blockIdx.x]
        rows = I(starts[cuda.blockIdx.x + 1] - start)
        # An entry without rows may begin past the last row.
        slot = sequences[min(start, I(last_row))]
        wait_for_inputs()
        if rows <= 0:
            return
        mine = found[min(I(start + lane), I(last_row))]
        draft = tokens[min(I(start + lane + 1), I(last_row))]
        first = positions[start]
        done = step[slot]
        n = I(0)
        if rows > 1:
            n = first_refused(lane < rows - 1 and mine == draft)
        # Every lane has read what some lanes are about to write.
        cuda.syncwarp()
        end_step(
            mine,
            n,
            rows_to_place(rows),
            first,
            done,
            n_ctx,
            advance(tokens, start),
            advance(positions, start),
            advance(history, I(slot * n_ctx)),
            advance(certain, slot),
            advance(ring, I(slot * ring_steps * RESULT_WORDS)),
            advance(pairs, I(slot * ring_steps * (RESULT_WORDS // 2))),
            ring_steps,
            advance(step, slot),
        )

    return accept


def _accept_listed(ratio: bool) -> DeviceFunction:
    warps = MOST_K // 32
    most_drafts = DECODE_ROWS - 1

    @cuda.jit
    def accept(
        found,
        starts,
        n_ctx,
        tokens,
        positions,
        sequences,
        history,
        certain,
        ring,
        pairs,
        ring_steps,
        step,
        params,
        ids,
        p,
        n_p,
        other_ids,
        q,
        n_q,
    ):
        let_next_begin()
        drafts = cuda.shared.array(DECODE_ROWS, np.int32)
        sizes = cuda.shared.array(DECODE_ROWS, np.int32)
        other_sizes = cuda.shared.array(DECODE_ROWS, np.int32)
        places = cuda.shared.array(DECODE_ROWS, np.int32)
        other_places = cuda.shared.array(DECODE_ROWS, np.int32)
        others = cuda.shared.array(MOST_K, np.int32)
        q_others = cuda.shared.array(MOST_K, np.float32)
        keys = cuda.shared.array(warps, np.uint64)
        accepted = cuda.shared.array(1, np.int32)
        candidates = cuda.local.array(most_drafts, np.int32)
        other_candidates = cuda.local.array(most_drafts, np.int32)
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        start = starts[cuda.blockIdx.x]
        rows = I(starts[cuda.blockIdx.x + 1] - start)
        # An entry without rows may begin at row 16, past the end.
        slot = sequences[min(start, I(most_drafts))]
        chosen_by = advance(params, I(slot * PARAMS_WORDS))
        wait_for_inputs()
        if rows <= 0:
            return

        # All loads are issued before the first result is needed; past the last draft, its list is loaded again.
        last = max(I(rows - 2), I(0))
        for i in range(most_drafts):
            candidates[i] = ids[MOST_K * (start + min(I(i), last)) + thread]
            if ratio:
                other_candidates[i] = other_ids[MOST_K * (start + min(I(i), last)) + thread]
        first = positions[start]
        done = step[slot]
        seed = u64(u32(chosen_by[SEED])) | (u64(u32(chosen_by[SEED + 1])) << u64(32))
        if thread < DECODE_ROWS:
            drafts[thread] = tokens[min(I(start + thread + 1), I(most_drafts))]
            sizes[thread] = n_p[min(I(start + thread), I(most_drafts))]
            places[thread] = I(-1)
            if ratio:
                other_sizes[thread] = n_q[min(I(start + thread), I(most_drafts))]
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
                drawn = found[start + lane]
                list_of = I(MOST_K * (start + lane))
                p_x = p[list_of + places[lane]] if places[lane] >= 0 else f32(0.0)
                if ratio:
                    q_x = f32(1.0) if other_sizes[lane] == 0 else f32(0.0)
                    if other_places[lane] >= 0:
                        q_x = q[list_of + other_places[lane]]
                    u = uniform(seed ^ ACCEPT_SEED, I(first + 1 + lane), x)
                    stays = drawn >= 0 and u * q_x < p_x
                else:
                    stays = drawn >= 0 and (x == drawn or p_x >= bits_float(chosen_by[P_ACCEPT]))
            n = first_refused(stays)
            if lane == 0:
                accepted[0] = n
        cuda.syncthreads()
        n = accepted[0]
        word = found[start + n]
        if ratio and n < rows - 1 and word >= 0:
            # The draw that replaces the rejected draft.
            size = sizes[n]
            other_size = other_sizes[n]
            place = I(MOST_K * (start + n) + thread)
            token = I(0)
            share = f32(0.0)
            if thread < size:
                token = ids[place]
                share = p[place]
            if thread < other_size:
                others[thread] = other_ids[place]
                q_others[thread] = q[place]
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
            end_step(
                mine,
                n,
                rows_to_place(rows),
                first,
                done,
                n_ctx,
                advance(tokens, start),
                advance(positions, start),
                advance(history, I(slot * n_ctx)),
                advance(certain, slot),
                advance(ring, I(slot * ring_steps * RESULT_WORDS)),
                advance(pairs, I(slot * ring_steps * (RESULT_WORDS // 2))),
                ring_steps,
                advance(step, slot),
            )

    return accept


# --- the start of a step ---------------------------------------------------------------------------------------


LAYOUT = 5 * DECODE_ANSWERS + 2
"""Words of a layout: of each row the slot, its place in its entry, its draft, and whether it is in use; the first row of each
entry."""

LAY_OUT_THREADS = DECODE_ANSWERS + 32
"""Threads of ``lay_out``: one for each row, and for the end of the last entry."""


def write_layout(layout: np.ndarray, entries: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Describe the rows of a step for ``lay_out``: layout int32 [LAYOUT].  entries: the slot of each answer, its number of
    rows, and its drafts, if the host has found them.

    Rows that no entry uses are copies of the last one in use, so that its results are computed again and change nothing;
    those of a single entry are the ones that its later steps may use.
    """
    slots, places, drafts, used = (layout[DECODE_ANSWERS * n : DECODE_ANSWERS * (n + 1)] for n in range(4))
    starts = layout[4 * DECODE_ANSWERS :]
    counts = [rows for _, rows, _ in entries]
    first = np.cumsum([0, *counts])
    row = int(first[-1])
    starts[: len(entries)], starts[len(entries) :] = first[:-1], row
    slots[:row] = np.repeat([slot for slot, _, _ in entries], counts)
    places[:row], drafts[:row] = np.arange(row) - np.repeat(first[:-1], counts), -1
    for at, (_, _, tokens) in zip(first, entries, strict=False):
        if tokens:
            drafts[at + 1 : at + 1 + len(tokens)] = tokens
    used[:row], used[row:] = 1, 0
    slots[row:], drafts[row:] = slots[row - 1], drafts[row - 1]
    places[row:] = places[row - 1] if len(entries) > 1 else np.arange(row, DECODE_ANSWERS)


@kernel(I32P, i32, *[I32P] * 6, threads=LAY_OUT_THREADS)
def lay_out() -> KernelCode:
    """The rows of a step as ``layout`` int32 [LAYOUT], in the host's pinned memory, describes them (``write_layout``):
    tokens, positions and slots of 128 rows, and the first rows of entries, from at int32 [slots], the position of the certain
    token of each answer, and history.  Grid: 1 block of ``LAY_OUT_THREADS`` threads, thread r for row r."""

    @cuda.jit
    def lay_out(layout, n_ctx, at, history, tokens, positions, sequences, starts):
        let_next_begin()
        row = I(cuda.threadIdx.x)
        wait_for_inputs()
        if row <= DECODE_ANSWERS:
            starts[row] = layout[4 * DECODE_ANSWERS + row]
        if row < DECODE_ANSWERS:
            slot, place = layout[row], layout[DECODE_ANSWERS + row]
            draft, used = layout[2 * DECODE_ANSWERS + row], layout[3 * DECODE_ANSWERS + row]
            position = I(at[slot] + place)
            known = advance(history, I(slot * n_ctx))
            token = draft
            if place == 0:
                token = known[position]
            tokens[row] = max(token, I(0))
            positions[row] = min(position, I(n_ctx - 1))
            sequences[row] = slot
            if used > 0 and draft >= 0 and position < n_ctx:
                known[position] = draft

    return lay_out


# --- drafts of a model -----------------------------------------------------------------------------------------


@kernel(I32P, I32P, I32P, i32, I32P, I32P, I32P, I32P, I32P, threads=32)
def begin_draft(rows: int, anchored: bool) -> KernelCode:
    """The first inputs of a draft model in a step: for entry e in rows e * rows .. of its tokens, positions and sequences the
    last ``rows`` tokens up to the target's certain one, whose position must be at least rows - 1.  If ``anchored``, that
    position and the one before it are written to anchor int32 [2, 128] in column e * rows.  An entry without rows repeats the
    last sampled token of the last entry that has some.  Grid: a block per entry, of a warp."""

    @cuda.jit
    def begin_draft(starts, target_positions, target_sequences, n_ctx, history, tokens, positions, sequences, anchor):
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        entry = I(cuda.blockIdx.x)
        start = starts[entry]
        while entry > 0 and start == starts[entry + 1]:
            entry = I(entry - 1)
            start = starts[entry]
        back = I(rows - 1 - lane) if entry == I(cuda.blockIdx.x) else I(0)
        wait_for_inputs()
        certain = target_positions[start]
        slot = target_sequences[start]
        if lane < rows:
            row = I(cuda.blockIdx.x * rows + lane)
            tokens[row] = history[slot * n_ctx + certain - back]
            positions[row] = I(certain - back)
            sequences[row] = slot
        if anchored and lane < 2:
            anchor[DECODE_ANSWERS * lane + cuda.blockIdx.x * rows] = I(certain - lane)

    return begin_draft


@kernel(I32P, I32P, I32P, i32, I32P, i32, i32, i32, i32, I32P, I32P, I32P, I32P, I32P, threads=32)
def begin_block() -> KernelCode:
    """The inputs of a network that drafts a block (``engine.models.drafter.BlockPass``), laid out like the rows of the
    target's step: for each entry its last sampled token, then ``mask``.

    Row r of an entry has position p + r, where p is that of its first row, and attends to positions up to last[r]: its own if
    ``causal`` is 1, otherwise that of the last row that predicts a draft of the entry.  ``shift``: see ``BlockPass``.  places
    int32 [16, 16]: element [i, e] is 1 + the row that predicts draft i of entry e.  Rows from starts[16] to ``rows`` - 1 are
    copies of the last row in use.  Grid: 1 block of a warp; lane r has row r and column r of places."""

    @cuda.jit
    def begin_block(
        starts,
        target_positions,
        target_sequences,
        n_ctx,
        history,
        rows,
        mask,
        shift,
        causal,
        tokens,
        positions,
        sequences,
        last,
        places,
    ):
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        row = min(lane, I(starts[DECODE_ROWS] - 1))
        entry = I(0)
        while starts[entry + 1] <= row:
            entry = I(entry + 1)
        start, end = starts[entry], starts[entry + 1]
        column = starts[min(lane, I(DECODE_ROWS))]
        wait_for_inputs()
        first = target_positions[start]
        slot = target_sequences[start]
        position = min(I(first + row - start), I(n_ctx - 1))
        seen = min(max(I(first + (end - start) - 2 + shift), first), I(n_ctx - 1))
        if lane < rows:
            token = I(mask)
            if row == start:
                token = history[slot * n_ctx + first]
            tokens[lane] = token
            positions[lane] = position
            sequences[lane] = slot
            last[lane] = position if causal == 1 else seen
        if lane < DECODE_ROWS:
            for i in range(DECODE_ROWS):
                places[i * DECODE_ROWS + lane] = I(1 + min(I(column + i + shift), I(DECODE_ROWS - 1)))

    return begin_block


PROPOSE_THREADS = DECODE_ANSWERS
"""Threads of ``propose``: one for each entry."""


@kernel(I32P, i32, i32, i32, i32, I32P, I32P, I32P, I32P, I32P, I32P, I32P, i32, threads=PROPOSE_THREADS)
def propose(scripted: bool) -> KernelCode:
    """The end of a draft model's step: the token that entry e has found, found[e], becomes its next input, in row e, and its
    draft number ``draft`` in the target's step, unless that has fewer rows for it: ``out``, the target's tokens.

    ``rows``: rows of an entry in the step that ends, the last of which was sampled; ``tokens``, ``positions``,
    ``sequences``: the draft model's; ``script`` int32 [slots, n_ctx]: if ``scripted``, the token proposed for a position
    instead of the model's own, unless negative; ``n_rows``: rows of the target's step, those of no entry included.
    Grid: 1 block of ``PROPOSE_THREADS`` threads, thread e for entry e: one that writes row e may do so only when all have
    read theirs.
    """

    @cuda.jit
    def propose(
        found, n_entries, rows, draft, n_ctx, starts, tokens, positions, sequences, history, script, out, n_rows
    ):
        let_next_begin()
        entry = I(cuda.threadIdx.x)
        token = I(0)
        position = I(0)
        slot = I(0)
        wait_for_inputs()
        if entry < n_entries:
            row = I(entry * rows + rows - 1)
            token = max(found[entry], I(0))
            position = I(positions[row] + 1)
            slot = sequences[row]
        cuda.syncthreads()
        if entry < n_entries:
            if position < n_ctx:
                at = I(slot * n_ctx + position)
                if scripted and script[at] >= 0:
                    token = script[at]
                history[at] = token
            tokens[entry] = token
            # Drafts that only other answers have room for may be made past the end of the context.
            positions[entry] = min(position, I(n_ctx - 1))
            sequences[entry] = slot
            place = I(starts[entry] + 1 + draft)
            if place < starts[entry + 1]:
                out[place] = token
                if place + 1 == starts[n_entries]:
                    # Rows after the last one in use are copies of it.
                    for row in range(place + 1, n_rows):
                        out[row] = token

    return propose
