"""A recorded pass: a list of operations in the form that the threads of a team execute.

Recording stores kernels and the addresses of their arguments, and computes nothing.  A program can be run any number of
times.  Its inputs and results are in fixed memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.cpu.runtime.entry import Entry, entry_of, words
from engine.cpu.runtime.pool import Allocation, owner
from engine.cpu.runtime.walk import ENDS, GATE, WORDS

TILE_NS = 6000.0
"""The intended time of a tile on one thread, in nanoseconds: long compared with claiming it, which takes about 100 ns, and
short compared with the work of all threads."""

MANY = 8
"""From this number of threads on, all threads get the same number of tiles of an operation: 34 tiles would take 16 threads
three rounds, the last of which has two tiles.  With fewer threads, the larger number of tiles costs more than it saves."""

LEAST_NS = 2000.0
"""The shortest time of a tile that is smaller than intended for that reason."""


class Operation(NamedTuple):
    """A kernel, the index of its arguments in the words of the program, its number of items, and the items per tile; or a
    gate, which has no kernel, and the address of its word in place of that index."""

    entry: Entry | None
    at: int
    items: int
    grain: int
    joined: bool


class Program:
    """The operations of a pass.

    check: called now and then while the pass waits at a gate, None if it has none; it raises an error if the word will not
    be set.
    waited_ns: how long the last pass has waited at gates, in nanoseconds.
    """

    def __init__(self, n_threads: int = 1) -> None:
        """n_threads: the number of threads that it is divided for."""
        self._n_threads = n_threads
        self.operations: list[Operation] = []
        self._words: list[int] = []
        #: The objects that the words point to, except intermediate results, whose memory belongs to a pool.
        self._kept: dict[int, Any] = {}
        self.result: np.ndarray | None = None
        self.check: Callable[[], None] | None = None
        self.waited_ns = 0

    def add(
        self, kernel: Any, arguments: Sequence[Any], items: int, ns: float, joined: bool = False, multiple: int = 1
    ) -> None:
        """Append a kernel that computes ``items`` items, each in about ``ns`` nanoseconds.

        joined: whether it is independent of the previous operation, so that both can run at the same time; multiple: the
        number of items of a tile is a multiple of this.
        """
        if items < 1:
            return
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                held = owner(argument)
                if not isinstance(held, Allocation):
                    self._kept[id(held)] = held
        at = len(self._words)
        self._words += words(arguments)
        grain = max(1, round(TILE_NS / ns / multiple)) * multiple
        if self._n_threads >= MANY and items > grain:
            rounds = math.ceil(items / (grain * self._n_threads))
            share = max(items / (rounds * self._n_threads), LEAST_NS / ns)
            grain = min(grain, math.ceil(share / multiple) * multiple)
        self.operations.append(Operation(entry_of(kernel, arguments), at, items, grain, joined))

    def add_gate(self, words: np.ndarray, i: int, check: Callable[[], None]) -> None:
        """Append a gate: the operations after it begin when words[i], int64, is not 0.  check: see :class:`Program`."""
        self._kept[id(words)] = words
        self.check = check
        self.operations.append(Operation(None, words.ctypes.data + 8 * i, 1, 1, False))

    def __len__(self) -> int:
        return len(self.operations)

    def entries(self) -> list[Entry]:
        """The distinct entries of its kernels."""
        return list(dict.fromkeys(operation.entry for operation in self.operations if operation.entry is not None))

    def finish(self) -> None:
        """Compile or load the kernels and build the tables for the threads.  To be called before the program is run."""
        addresses = {entry: entry.address() for entry in self.entries()}
        n = len(self)
        self._record = np.array(self._words, np.int64)
        self.table = np.zeros((n, WORDS), np.int64)
        #: int64 [n]: the initial ``left`` and ``undone`` of ``engine/cpu/runtime/walk.py``, without the number of the pass.
        self.left, self.undone = np.zeros(n, np.int64), np.zeros(n, np.int64)
        last = n - 1
        for k in range(n - 1, -1, -1):
            operation = self.operations[k]
            ends = k == n - 1 or not self.operations[k + 1].joined
            last = k if ends else last
            tiles = -(-operation.items // operation.grain)
            address, record = 0, operation.at
            if operation.entry is not None:
                address, record = addresses[operation.entry], self._record.ctypes.data + 8 * operation.at
            self.table[k] = address, record, operation.items, operation.grain, tiles, last
            self.left[k] = tiles | (ENDS if ends else 0) | (GATE if operation.entry is None else 0)
            self.undone[last] += tiles
