"""A recorded pass: a list of operations, in the form in which the threads of a team compute them.

Recording notes kernels and the addresses of their arguments and computes nothing.  A program can be run any number of times;
inputs and results are in memory that it refers to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.cpu.runtime.entry import Entry, entry_of, words
from engine.cpu.runtime.pool import Block, owner
from engine.cpu.runtime.walk import ENDS, WORDS

TILE_NS = 6000.0
"""The time that a tile should take on one thread, in nanoseconds: long compared with claiming it, which takes some 100 ns,
and short compared with the work of all threads."""


class Operation(NamedTuple):
    """A kernel, the place of its arguments among the words of the program, its number of items, and those of a tile."""

    entry: Entry
    at: int
    items: int
    grain: int
    joined: bool


class Program:
    """The operations of a pass."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._words: list[int] = []
        #: What the words point to, except intermediate results, whose memory belongs to a pool.
        self._kept: dict[int, Any] = {}
        self.result: np.ndarray | None = None

    def add(
        self, kernel: Any, arguments: Sequence[Any], items: int, ns: float, joined: bool = False, multiple: int = 1
    ) -> None:
        """Append a kernel that computes ``items`` items, each in about ``ns`` nanoseconds.

        joined: it does not depend on the operation before, so that both can be computed at the same time; multiple: tiles
        consist of a multiple of this number of items.
        """
        if items < 1:
            return
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                held = owner(argument)
                if not isinstance(held, Block):
                    self._kept[id(held)] = held
        at = len(self._words)
        self._words += words(arguments)
        grain = max(1, round(TILE_NS / ns / multiple)) * multiple
        self.operations.append(Operation(entry_of(kernel, arguments), at, items, grain, joined))

    def __len__(self) -> int:
        return len(self.operations)

    def entries(self) -> list[Entry]:
        """The entries of its kernels, each once."""
        return list(dict.fromkeys(operation.entry for operation in self.operations))

    def finish(self) -> None:
        """Compile or load the kernels and write the tables that threads read.  Call it before the program is run."""
        addresses = {entry: entry.address() for entry in self.entries()}
        n = len(self)
        self._record = np.array(self._words, np.int64)
        self.table = np.zeros((n, WORDS), np.int64)
        #: int64 [n]: what ``left`` and ``undone`` of ``engine/cpu/runtime/walk.py`` are when a pass begins, without its
        #: number.
        self.left, self.undone = np.zeros(n, np.int64), np.zeros(n, np.int64)
        last = n - 1
        for k in range(n - 1, -1, -1):
            operation = self.operations[k]
            ends = k == n - 1 or not self.operations[k + 1].joined
            last = k if ends else last
            tiles = -(-operation.items // operation.grain)
            record = self._record.ctypes.data + 8 * operation.at
            self.table[k] = addresses[operation.entry], record, operation.items, operation.grain, tiles, last
            self.left[k] = tiles | (ENDS if ends else 0)
            self.undone[last] += tiles
