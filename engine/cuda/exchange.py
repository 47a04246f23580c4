"""Rows that go from a pass on the GPU to the host and back while the pass runs, through the host's pinned memory.

    send:     copy x, and the experts that its rows have chosen, to pinned memory; barrier; set the border's flag
    receive:  wait for the border's flag; barrier; copy pinned memory to x

Formula: none, the bits are copied.
Shapes: x, rows uint32 [n], the words of float32 [rows, width]; n is a multiple of 4 in ``receive``, which may write up to 3
    words after those of x; ids, weights uint32 [n_pairs], the words of int32 and float32 [rows, n_used], and chosen uint32
    [2 n_pairs], where they go; flag int32 [1].
Who owns what: one block copies everything.  In ``receive`` thread 0 reads the flag until it is set; then every thread owns
    groups of 4 words.
Reduction order: none.
Bytes moved: 4 n + 8 n_pairs over the bus, and the flag as often as it is read.

``engine/cpu/runtime/flags.py`` has the values of flags.  After an error the pass continues with wrong numbers, which the host
does not use.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

import numpy as np
from numba import cuda

from engine.compile.jobs import Job
from engine.cpu.runtime import flags
from engine.cpu.runtime.flags import ABANDONED, EXPIRED, GIVEN
from engine.cuda.intrinsics import announce, awaited, fresh4, let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import I32P, U32P, i32, kernel
from engine.cuda.runtime.jobs import gpu_job
from engine.cuda.runtime.kinds import KernelCode
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Tensor
from engine.errors import DeviceError
from engine.ops.exchange import Host

I = np.int32  # noqa: E741

THREADS = 512
"""Threads of the block that copies."""

POLLS = 1 << 29
"""The number of times that the device reads a flag before it gives up.  Each takes about a microsecond."""

WORDS = 8
"""Words of a cache line, int64: flags of different borders are in different lines."""


@kernel(U32P, i32, U32P, U32P, i32, U32P, U32P, I32P, threads=THREADS)
def send(threads: int) -> KernelCode:
    """rows = x and chosen = (ids, weights), then the flag is set.  Grid: 1."""

    @cuda.jit
    def send(x, n, ids, weights, n_pairs, rows, chosen, flag):
        let_next_begin()
        wait_for_inputs()
        i = I(cuda.threadIdx.x)
        while i < n:
            rows[i] = x[i]
            i = I(i + threads)
        i = I(cuda.threadIdx.x)
        while i < n_pairs:
            chosen[i] = ids[i]
            chosen[n_pairs + i] = weights[i]
            i = I(i + threads)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            announce(flag, I(0), I(GIVEN))

    return send


@kernel(U32P, i32, U32P, I32P, i32, threads=THREADS)
def receive(threads: int) -> KernelCode:
    """x = rows, as soon as the flag is set or has been read ``polls`` times.  Grid: 1."""

    @cuda.jit
    def receive(rows, n, x, flag, polls):
        wait_for_inputs()
        if cuda.threadIdx.x == 0:
            left = polls
            while awaited(flag, I(0)) == 0 and left > 0:
                left = I(left - 1)
            if left == 0:
                announce(flag, I(0), I(EXPIRED))
        cuda.syncthreads()
        # Only now, so that the next kernel does not occupy multiprocessors while this one waits.
        let_next_begin()
        i = I(4 * cuda.threadIdx.x)
        while i < n:
            a, b, c, d = fresh4(rows, i)
            x[i] = a
            x[i + 1] = b
            x[i + 2] = c
            x[i + 3] = d
            i = I(i + 4 * threads)

    return receive


class _Pause:
    """Keeps the garbage collector from running while any pass waits for the host: to free memory of a GPU waits for its
    kernels, one of which would wait for the thread that frees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_enabled = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count and self._was_enabled:
                    gc.enable()


_pause = _Pause()


class PinnedExchange:
    """The borders of the passes of one model (``engine.ops.exchange.Exchange``).

    rows: pinned memory float32 [rows, width].
    """

    def __init__(self, recorder: Recorder, borders: int, rows: int, width: int, n_used: int = 0) -> None:
        """borders: their number; rows: the most rows of a pass; n_used: the most experts of a row that are sent with it.
        Raises DeviceError if the system has no pinned memory."""
        self._recorder, self._device = recorder, recorder.device
        # Those of a pass in whole groups of 4 words.
        words, self._address = self._device.pinned((-(-rows * width // 4) * 4,), np.float32)
        self.rows = words[: rows * width].reshape(rows, width)
        self._chosen, self._chosen_address = self._device.pinned((max(1, 2 * rows * n_used),), np.int32)
        self._flags, self._flags_address = self._device.pinned((borders * WORDS,), np.int64)
        #: Where the flags that the device sets are.
        self._sent: list[int] = []

    def chosen(self, rows: int, n_used: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = rows * n_used
        ids, weights = self._chosen[:pairs], self._chosen[pairs : 2 * pairs].view(np.float32)
        return ids.reshape(rows, n_used), weights.reshape(rows, n_used)

    def send(self, border: int, x: Tensor, chosen: tuple[Tensor, Tensor] | None = None) -> None:
        ids, weights, pairs = (0, 0, 0) if chosen is None else (*chosen, chosen[0].size)
        arguments = x, x.size, ids, weights, pairs, self._address, self._chosen_address, self._flag(border)
        self._recorder.launch(send(THREADS), (1,), THREADS, arguments)
        if border * WORDS not in self._sent:
            self._sent.append(border * WORDS)

    def receive(self, border: int, x: Tensor) -> None:
        arguments = self._address, -(-x.size // 4) * 4, x, self._flag(border), POLLS
        self._recorder.launch(receive(THREADS), (1,), THREADS, arguments, result=x)

    def _flag(self, border: int) -> int:
        return self._flags_address + 8 * WORDS * border

    @contextlib.contextmanager
    def turns(self) -> Iterator[None]:
        self._flags[:] = 0
        with _pause():
            try:
                yield
            except BaseException:
                for i in range(0, self._flags.size, WORDS):
                    flags.put(self._flags, i, ABANDONED)
                self._device.synchronize()
                raise
        # The device may have given up at the moment at which the host answered.
        if EXPIRED in self._flags:
            raise self._expired()

    def take(self, host: Host, border: int) -> None:
        host.take(self._flags, border * WORDS, self.check)

    def give(self, host: Host, border: int, x: np.ndarray, rows: int) -> None:
        host.give(x, self.rows[:rows], self._flags, border * WORDS)

    def check(self) -> None:
        """Raise DeviceError if the device has ended its pass and has not sent everything."""
        if self._device.is_idle() and not self._flags[self._sent].all():
            raise DeviceError(f'{self._device.name} has ended a pass early; run again, or use device="cpu".')

    def _expired(self) -> DeviceError:
        return DeviceError(
            f"{self._device.name} has waited too long for the CPU, perhaps because this process was stopped; try again."
        )

    def jobs(self) -> list[Job]:
        kernels = [gpu_job(kernel(THREADS), self._device.compute_capability) for kernel in (send, receive)]
        return [*kernels, *flags.flag_jobs()]
