"""Recording passes: while a pass is recorded, its operations are noted; otherwise they are computed when they are called."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cpu.runtime.pool import Pool
from engine.cpu.runtime.program import TILE_NS, Program
from engine.cpu.runtime.team import team

f32 = np.float32


class Recorder:
    """Starts kernels: at once, or as operations of the program that is being recorded."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pool = Pool()
        self._program: Program | None = None

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = f32) -> np.ndarray:
        """An uninitialized array for the result of an operation."""
        return np.empty(shape, dtype) if self._program is None else self._pool.empty(shape, dtype)

    def do(self, kernel: Any, *arguments: Any, items: int, ns: float, joined: bool = False, multiple: int = 1) -> None:
        """Compute items [0, items) of a kernel, each of which takes about ``ns`` nanoseconds.

        joined: it does not depend on the operation before; multiple: the kernel is fastest with multiples of this number of
        items.
        """
        if self._program is None:
            kernel(*arguments, 0, items)
        else:
            if not joined:
                self._pool.begin_stage()
            self._program.add(kernel, arguments, items, ns, joined, multiple)

    def record(self, body: Callable[[], np.ndarray | None]) -> Program:
        """The operations that ``body`` calls, and its result, as a program."""
        self._program = Program()
        try:
            result = body()
            program = self._program
        finally:
            self._program = None
        program.result = result
        return program

    def run_program(self, program: Program) -> None:
        """Compute the operations of a program, which is finished."""
        team().run(program, self.n_threads)

    def compute(self, kernel: Any, *arguments: Any, items: int) -> None:
        """Compute items [0, items) of a kernel at once, with all threads; an item takes at least some microseconds."""
        program = Program()
        program.add(kernel, arguments, items, TILE_NS)
        program.finish()
        self.run_program(program)

    def flush(self) -> None:
        """Compute the operations that have been recorded so far, so that their results can be looked at; the program
        continues without them."""
        if self._program is not None:
            program, self._program = self._program, Program()
            program.finish()
            self.run_program(program)
