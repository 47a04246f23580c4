"""Recording passes: operations are stored while a pass is being recorded, and executed at once otherwise."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cpu.runtime import flags
from engine.cpu.runtime.pool import Pool
from engine.cpu.runtime.program import TILE_NS, Program
from engine.cpu.runtime.team import team

f32 = np.float32


class Recorder:
    """Executes kernels at once, or adds them to the program that is being recorded."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        #: Seconds that the last pass has waited for a device.
        self.waited_seconds = 0.0
        self._pool = Pool()
        self._program: Program | None = None

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = f32) -> np.ndarray:
        """An uninitialized array for the result of an operation."""
        return np.empty(shape, dtype) if self._program is None else self._pool.empty(shape, dtype)

    def do(self, kernel: Any, *arguments: Any, items: int, ns: float, joined: bool = False, multiple: int = 1) -> None:
        """Compute items [0, items) of a kernel, each in about ``ns`` nanoseconds.

        joined: whether it is independent of the previous operation; multiple: the kernel is fastest with a multiple of this
        number of items.
        """
        if self._program is None:
            kernel(*arguments, 0, items)
        else:
            if not joined:
                self._pool.begin_stage()
            self._program.add(kernel, arguments, items, ns, joined, multiple)

    def take(self, words: np.ndarray, i: int, check: Callable[[], None]) -> None:
        """Record that a pass waits until a device has set words[i], int64.  check: called while it waits for long; it raises
        an error if the device will not do so."""
        assert self._program is not None, "only recorded passes wait for a device"
        self._pool.begin_stage()
        self._program.add_gate(words, i, check)

    def give(self, x: np.ndarray, rows: np.ndarray, words: np.ndarray, i: int) -> None:
        """Record that x, float32 [m, width], is copied to ``rows`` [n >= m, width], whose further rows become copies of the
        last one, and that words[i], int64, is then set for a device."""
        self.do(flags.give, x, rows, words, i, items=1, ns=TILE_NS)

    def record(self, body: Callable[[], np.ndarray | None]) -> Program:
        """A program of the operations that ``body`` calls, with its result."""
        self._program = Program(self.n_threads)
        try:
            result = body()
            program = self._program
        finally:
            self._program = None
        program.result = result
        return program

    @contextlib.contextmanager
    def together(self, others: "Sequence[Recorder]") -> Iterator[None]:
        """Add the operations of the others to the program that is being recorded, in the order of the calls."""
        for other in others:
            other._program = self._program
        try:
            yield
        finally:
            for other in others:
                other._program = None

    def meet(self) -> None:
        """Do nothing: the operations of a program run in the order of the calls."""

    def run_program(self, program: Program) -> None:
        """Execute a program, after ``Program.finish``."""
        team().run(program, self.n_threads)
        self.waited_seconds = program.waited_ns / 1e9

    def compute(self, kernel: Any, *arguments: Any, items: int) -> None:
        """Compute items [0, items) of a kernel at once with all threads; an item takes at least a few microseconds."""
        program = Program()
        program.add(kernel, arguments, items, TILE_NS)
        program.finish()
        self.run_program(program)

    def flush(self) -> None:
        """Execute the operations recorded so far, so that their results can be read.  Recording continues with an empty
        program."""
        if self._program is not None:
            program, self._program = self._program, Program(self.n_threads)
            program.finish()
            self.run_program(program)
