"""The digest of rows of logits on the GPU, for receipts: 128 bits, and the two largest logits.

Formula: ``engine/cpu/digest.py``: two sums of mixed words modulo 2**64, and the two largest logits.
Shapes: up to 128 rows of logits float32 [n_vocab], one every ``stride``, before anything has changed them.  As in
    ``engine/cuda/accept.py``, entry e owns rows starts[e] .. starts[e + 1] - 1, all of slot sequences[starts[e]]; starts is
    int32 [17], or [129] in a pass of more than 16 rows, sequences int32 [rows], and step int32 [slots] the number of steps
    of a slot that have ended.  sums uint64 [rows][32][4]: of a part of a row, the two sums and the two largest keys.  digests
    int32 [slots][parts][16][8], parts a power of two, pinned memory of the host: of each row of the step, by its number in
    the entry, the sums (low, high, 64 bits each), then the token and the bits of the largest logit, and those of the second.
Who owns what: ``digest``: up to 32 blocks per row, thread j of block b owns logits j + b * threads, and others at distances
    of a multiple of all threads of the row; the lanes of a warp are folded in halves, then the first warp folds the warps.
    ``join_digests``: a warp per row, lane b owns the part of block b.  Rows of no entry are padding: nothing is written.
Reduction order: any, for integers are added and compared: ((lane 0 + lane 16) + (lane 8 + lane 24)) + ... in a warp.
Bytes moved: 4 n_vocab per row, twice 1024 for its parts, and 32 over the bus.

Only a step with a request that wants a receipt launches these kernels, before masks, biases and penalties change the logits.
``accept`` follows them and tells the host that the step has ended, so the digests must have arrived by then: hence the fence.
"""

import numpy as np
from numba import cuda

from engine.cpu.digest import GAMMA, word_of
from engine.cpu.sample import pack, place_of
from engine.cuda.accept import lane_xor_long
from engine.cuda.intrinsics import advance, float_bits, let_next_begin, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U64P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.limits import DECODE_ROWS
from engine.numerics import mix64

u32 = np.uint32
u64 = np.uint64
I = np.int32  # noqa: E741

THREADS = 256
"""Threads of a block."""
BLOCKS = 32
"""The most blocks of a row: one for each lane of the warp that joins their parts."""
SUMS = 4
"""Values of a part of a row."""
WORDS = 8
"""Words of a row's digest."""

_BATCH = 4  # loads of a thread in flight at once
_LOW, _HIGH, _FIRST, _SECOND = 0, 1, 2, 3


@device
def fold_warp(own):
    """Fold the four values of each lane of a warp; ``own``: uint64 [4] of the lane, which holds the result."""
    for step in range(5):
        lane = I(16) >> I(step)
        own[_LOW] += lane_xor_long(own[_LOW], lane)
        own[_HIGH] += lane_xor_long(own[_HIGH], lane)
        other = lane_xor_long(own[_FIRST], lane)
        second = lane_xor_long(own[_SECOND], lane)
        own[_SECOND] = max(min(own[_FIRST], other), max(own[_SECOND], second))
        own[_FIRST] = max(own[_FIRST], other)


@kernel(F32P, i32, i32, I32P, U64P, threads=THREADS)
def digest(threads: int) -> KernelCode:
    """The sums of the parts of the rows of a step.  Grid: :func:`blocks_of`, rows."""
    warps = threads // 32

    @cuda.jit
    def digest(rows, stride, n_vocab, starts, sums):
        let_next_begin()
        of_warps = cuda.shared.array((SUMS, 32), np.uint64)
        x = cuda.local.array(_BATCH, np.float32)
        own = cuda.local.array(SUMS, np.uint64)
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        row = I(cuda.blockIdx.y)
        stretch = I(threads * cuda.gridDim.x)
        logits = advance(rows, I(row * stride))
        for part in range(SUMS):
            own[part] = u64(0)
        wait_for_inputs()
        # The rows of all entries: each entry of a pass of more rows has a single one.
        if row >= starts[max(I(DECODE_ROWS), I(cuda.gridDim.y))]:
            return
        i = I(cuda.blockIdx.x * threads + thread)
        while i < n_vocab:
            # All loads are issued before the first result is needed; past the end, a thread loads its own first logit again.
            for b in range(_BATCH):
                other = I(i + stretch * b)
                x[b] = logits[other if other < n_vocab else i]
            for b in range(_BATCH):
                token = I(i + stretch * b)
                if token < n_vocab:
                    word = word_of(x[b], token)
                    own[_LOW] += word
                    own[_HIGH] += mix64(word + GAMMA)
                    key = pack(x[b], token)
                    own[_SECOND] = max(own[_SECOND], min(own[_FIRST], key))
                    own[_FIRST] = max(own[_FIRST], key)
            i = I(i + stretch * _BATCH)
        fold_warp(own)
        if lane == 0:
            for part in range(SUMS):
                of_warps[part, thread >> 5] = own[part]
        cuda.syncthreads()
        if thread < 32:
            for part in range(SUMS):
                own[part] = of_warps[part, lane] if lane < warps else u64(0)
            fold_warp(own)
            if lane == 0:
                out = advance(sums, I((row * BLOCKS + I(cuda.blockIdx.x)) * SUMS))
                for part in range(SUMS):
                    out[part] = own[part]

    return digest


@kernel(F32P, i32, I32P, I32P, I32P, i32, U64P, i32, I32P, threads=32)
def join_digests() -> KernelCode:
    """The digests of the rows of a step, from the sums of their parts.  Grid: rows, of a warp each."""

    @cuda.jit
    def join_digests(rows, stride, starts, sequences, step, blocks, sums, parts, digests):
        let_next_begin()
        own = cuda.local.array(SUMS, np.uint64)
        lane = I(cuda.threadIdx.x)
        row = I(cuda.blockIdx.x)
        logits = advance(rows, I(row * stride))
        wait_for_inputs()
        entry = I(0)
        # Each entry of a pass of more rows has a single one.
        entries = max(I(DECODE_ROWS), I(cuda.gridDim.x))
        while entry < entries and starts[entry + 1] <= row:
            entry = I(entry + 1)
        if entry == entries:
            return
        mine = advance(sums, I((row * BLOCKS + lane) * SUMS))
        for part in range(SUMS):
            own[part] = mine[part] if lane < blocks else u64(0)
        fold_warp(own)
        if lane == 0:
            slot = sequences[row]
            place = I(I(slot * parts + (step[slot] & (parts - 1))) * DECODE_ROWS + row - starts[entry])
            out = advance(digests, I(place * WORDS))
            for part in range(2):
                out[2 * part] = I(u32(own[part] & u64(0xFFFFFFFF)))
                out[2 * part + 1] = I(u32(own[part] >> u64(32)))
            for part in range(2):
                token = I(place_of(own[_FIRST + part]))
                out[4 + 2 * part] = token
                out[5 + 2 * part] = float_bits(logits[token])
            cuda.threadfence_system()

    return join_digests


def blocks_of(n_vocab: int, threads: int = THREADS) -> int:
    """The number of blocks of a row: a thread has few logits, unless the vocabulary is large."""
    return min(BLOCKS, -(-n_vocab // threads))


def kernels() -> list[Specialization]:
    """The kernels of a step, in order."""
    return [digest(THREADS), join_digests()]
