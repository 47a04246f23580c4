"""Recording passes: operations are stored while a pass is being recorded, and executed at once otherwise."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cpu.runtime.pool import Pool
from engine.cpu.runtime.program import TILE_NS, Program
from engine.cpu.runtime.team import team

f32 = np.float32


class Recorder:
    """Executes kernels at once, or adds them to the program that is being recorded."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
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

    def run_program(self, program: Program) -> None:
        """Execute a program, after ``Program.finish``."""
        team().run(program, self.n_threads)

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
