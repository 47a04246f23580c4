"""A plain read of memory: the upper bound on the speed of a decode step.

Formula: sums[t] = sum of the words that thread t reads, mod 2^32.
Shapes: data uint32 [blocks * steps * STEP]; sums uint32 [blocks * THREADS].
Who owns what: a block owns a run of steps * STEP words and processes it in steps; in each step every thread reads LOADS
    vectors of 16 bytes, adjacent to those of its neighbours; all LOADS are in flight before the first is used.
Reduction order: any, since integers do not round.
Bytes moved: 4 per word, and 4 per thread at the end.
"""

from weakref import WeakKeyDictionary

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, let_next_begin, stream4, wait_for_inputs
from engine.cuda.runtime.compiler import U32P, i32, kernel
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.kinds import KernelCode

THREADS = 256
LOADS = 8

WORDS = 4 * LOADS
STEP = WORDS * THREADS
"""Words that a thread and a block read per step; 32 KiB for a block."""

BLOCKS = 4
"""Blocks per multiprocessor: together 1024 threads, which fit on every GPU, with 128 KiB in flight."""

LARGEST = 1 << 30
"""Bytes read per measurement: far more than the caches of any GPU hold."""

PASSES = 8

I = np.int32  # noqa: E741
u32 = np.uint32


@kernel(U32P, i32, U32P, threads=THREADS, blocks=BLOCKS)
def read_sum() -> KernelCode:
    """Sums per thread.  Grid: as many blocks as the layout of data has, of THREADS threads."""

    @cuda.jit
    def read_sum(data, steps, sums):
        let_next_begin()
        thread = I(cuda.threadIdx.x)
        p = advance(data, np.int64(cuda.blockIdx.x) * steps * STEP + 4 * thread)
        wait_for_inputs()
        words = cuda.local.array(WORDS, np.uint32)
        total = u32(0)
        for _ in range(steps):
            for k in range(LOADS):
                words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = stream4(p, 4 * THREADS * k)
            for k in range(WORDS):
                total = u32(total + words[k])
            p = advance(p, STEP)
        sums[cuda.blockIdx.x * THREADS + thread] = total

    return read_sum


_measured: "WeakKeyDictionary[Device, float]" = WeakKeyDictionary()


def device_bandwidth(device: Device) -> float:
    """Bytes per second that ``read_sum`` reads on a GPU, the best of several passes; measured once, in a few milliseconds.

    It reads 1 GiB, or an eighth of the free memory if that is less.  Raises DeviceError if almost no memory is free.
    """
    if device not in _measured:
        _measured[device] = _measure(device)
    return _measured[device]


def _measure(device: Device) -> float:
    blocks = BLOCKS * device.multiprocessors
    size = 4 * STEP * blocks
    steps = max(1, min(LARGEST, device.free_memory() // 8) // size)
    data = device.allocate(steps * size, "the measurement of its bandwidth")
    sums = device.allocate(4 * THREADS * blocks, "the measurement of its bandwidth")
    arguments = (data.address, steps, sums.address)
    marks = []
    # The first pass is not timed: while it runs, the timed ones are queued behind it, so no gap between two is counted.
    for _ in range(PASSES + 1):
        device.launch(read_sum(), blocks, THREADS, arguments)
        marks.append(device.event())
    return steps * size / min(map(device.elapsed, marks, marks[1:]))
