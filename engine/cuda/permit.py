"""Grammar masks on the GPU: logits of tokens that a grammar does not permit become -inf.

Formula: ``permit`` of ``engine/cpu/sample.py``, before every other change of the logits.
Shapes: rows of logits float32 [n_vocab], one every ``stride``; masks int32 [n][1 + words], words = ceil(n_vocab / 32), in the
    host's pinned memory: word 0 is the row that the mask is for, the others its bits, the lowest bit of a word first.  Rows
    without a mask are not visited.
Who owns what: a block owns 256 words of a mask and their 8192 logits.  A word is read once, over the bus, by one thread;
    consecutive threads own consecutive logits.
Reduction order: none.
Bytes moved: n_vocab / 8 per mask over the bus, and 4 for each token that is not permitted.

The host writes a part of pinned memory before it launches the kernel, and again only when that has ended.
"""

import math
from collections.abc import Sequence

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.kinds import KernelCode
from engine.limits import DECODE_ROWS

f32 = np.float32
I = np.int32  # noqa: E741

THREADS = 256
"""Threads of a block, and words of a mask that it owns."""

PARTS = 8
"""Parts of pinned memory with the masks of a pass each: more than passes can be in flight."""


@kernel(F32P, i32, i32, I32P, threads=THREADS)
def permit(threads: int) -> KernelCode:
    """Apply masks in place.  Grid: ceil(words / threads), masks."""

    @cuda.jit
    def permit(rows, stride, n_vocab, masks):
        let_next_begin()
        bits = cuda.shared.array(threads, np.int32)
        thread = I(cuda.threadIdx.x)
        first = I(cuda.blockIdx.x * threads)
        words = I((n_vocab + 31) >> 5)
        mask = advance(masks, I(I(cuda.blockIdx.y) * (words + 1)))
        wait_for_inputs()
        logits = advance(rows, I(mask[0] * stride))
        if first + thread < words:
            bits[thread] = mask[1 + first + thread]
        cuda.syncthreads()
        i = thread
        place = I(32 * first + i)
        while i < 32 * threads and place < n_vocab:
            if (bits[i >> 5] >> (i & 31)) & 1 == 0:
                logits[place] = f32(-math.inf)
            i = I(i + threads)
            place = I(place + threads)

    return permit


class Masks:
    """Pinned memory for the masks of passes."""

    def __init__(self, device: Device, n_vocab: int, rows: int = DECODE_ROWS) -> None:
        """device: an ``engine.cuda.runtime.device.Device``; rows: the most rows of a pass that have masks."""
        self._device = device
        self._n_vocab = n_vocab
        self._words = -(-n_vocab // 32)
        self._parts, self._address = device.pinned((PARTS, rows, 1 + self._words), np.int32)
        self._used = 0

    def apply(self, logits: int, stride: int, masks: Sequence[tuple[int, np.ndarray]]) -> None:
        """Launch the kernel for logits at an address, a row every ``stride``; masks: pairs of a row and its mask, int32
        [words].  At most ``PARTS`` launches may be in flight."""
        if not masks:
            return
        part = self._parts[self._used % PARTS]
        address = self._address + part.nbytes * (self._used % PARTS)
        self._used += 1
        for entry, (row, mask) in zip(part, masks, strict=False):
            entry[0], entry[1:] = row, mask[: self._words]
        grid = -(-self._words // THREADS), len(masks)
        self._device.launch(permit(THREADS), grid, THREADS, [logits, stride, self._n_vocab, address])
