"""The laws of the atoms of ``engine/cuda/warpgroups.py`` in the simulator.

A copy in bulk takes place when a thread finds that it must wait for it, so that reading its result before is detected: shared
memory is filled with bytes 0xFF.  A warpgroup's warps do not wait for each other here, since their products are independent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import getcurrent

from engine.cuda.runtime.kinds import Register
from engine.cuda.runtime.simulator import Lane, Pointer, _meet

__all__ = [
    "barrier_arrive",
    "barrier_expect",
    "barrier_init",
    "barrier_wait",
    "barriers_ready",
    "bulk_copy",
    "make_half_products",
    "make_low_products",
    "make_step_products",
    "matrices",
]


@dataclass
class _Barrier:
    arrivals: int
    phase: int = 0
    pending: int = 0
    n_bytes: int = 0
    copies: list[Callable[[], int]] = field(default_factory=list)

    def end(self) -> None:
        """End the phase if nothing is missing."""
        if self.pending == 0 and self.n_bytes == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def copy(self) -> None:
        """Copy what is under way."""
        for copy in self.copies:
            self.n_bytes -= copy()
        if self.copies:
            self.copies.clear()
            self.end()


def _barrier(p: Pointer, i: Register) -> _Barrier:
    lane: Any = getcurrent()
    found: _Barrier = lane.block.barriers[p.offset + int(i)]
    return found


def barrier_init(p: Pointer, i: Register, n: Register) -> None:
    """Make two words a barrier whose phases end after n arrivals."""
    at = p.offset + int(i)
    if at % 2:
        raise ValueError(f"a barrier at word {at} is not aligned")
    lane: Any = getcurrent()
    lane.block.barriers[at] = _Barrier(int(n), pending=int(n))


def barriers_ready() -> None:
    """Do nothing: the copies see all barriers."""


def barrier_arrive(p: Pointer, i: Register) -> None:
    """Arrive."""
    barrier = _barrier(p, i)
    if barrier.pending == 0:
        raise RuntimeError("more threads arrive at a barrier than it expects")
    barrier.pending -= 1
    barrier.end()


def barrier_expect(p: Pointer, i: Register, n: Register) -> None:
    """Arrive, and expect n bytes more."""
    _barrier(p, i).n_bytes += int(n)
    barrier_arrive(p, i)


def barrier_wait(p: Pointer, i: Register, parity: Register) -> None:
    """Wait until the latest phase of this parity has ended."""
    barrier, lane = _barrier(p, i), getcurrent()
    assert isinstance(lane, Lane)

    def ended() -> bool:
        barrier.copy()
        return barrier.phase & 1 != int(parity)

    while not ended():
        lane.wait("barrier_wait", ended)


def bulk_copy(to: Pointer, i: Register, p: Pointer, n_bytes: Register, barriers: Pointer, k: Register) -> None:
    """Copy bytes to shared memory when somebody waits for them."""
    n = int(n_bytes)
    size = p.array.dtype.itemsize
    if (4 * (to.offset + int(i)) | size * p.offset | n) % 16:
        raise ValueError("a copy in bulk is not aligned to 16 bytes")
    target, source = to._place(i, n // 4), p._place(0, n // size)

    def copy() -> int:
        to.array[target : target + n // 4] = p.array[source : source + n // size].view(np.uint32)
        return n

    _barrier(barriers, k).copies.append(copy)


def _rows(given: list[Any], n: int) -> np.ndarray:
    """The lanes' words uint32 [32, n] as [g, t, n]."""
    words = np.array([[int(word) & 0xFFFFFFFF for word in lane] for lane in given], np.uint32)
    return words.reshape(8, 4, n)


def _fragments(c: np.ndarray) -> list[np.ndarray]:
    """The sums [16, columns] of each lane."""
    parts = c.reshape(2, 8, c.shape[1] // 8, 4, 2)  # half, g, n, t, column
    lanes = parts.transpose(1, 3, 2, 0, 4).reshape(32, -1)
    return list(lanes)


def _bytes(plane: np.ndarray, signed: bool) -> np.ndarray:
    """The numbers in an array of bytes."""
    return plane.view(np.int8 if signed else np.uint8).astype(np.int64)


def matrices(p: Pointer, i: Register) -> tuple[Pointer, int]:
    """Core matrices: where they begin."""
    return p, int(i)


def make_step_products(
    columns: int, signed: bool, planes: int
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """One or two planes of bytes times columns of int8, 32 positions at a time."""

    def law(given: list[Any]) -> list[np.ndarray]:
        (p, i), j = given[0][1:]
        at = p._place(i, columns * 64)
        x = p.array[at : at + columns * 64].view(np.int8).reshape(columns // 8, 8, 2, 8, 16)[:, int(j)]
        x = x.transpose(0, 2, 1, 3).reshape(columns, 32).astype(np.int64)
        # g, t, plane, 16 positions, row g or g + 8, byte
        a = np.ascontiguousarray(_rows([words for words, *_ in given], 4 * planes)).view(np.uint8)
        a = a.reshape(8, 4, planes, 2, 2, 4).transpose(2, 4, 0, 3, 1, 5).reshape(planes, 16, 32)
        found = (_fragments((_bytes(a[k], signed and k == 0) @ x.T).astype(np.int32)) for k in range(planes))
        return [np.concatenate(own) for own in zip(*found, strict=True)]

    def add_products(words: Any, x: tuple[Pointer, int], j: Register, dots: np.ndarray) -> None:
        dots += _meet("add_products", (words, x, j), law)

    def begin_products(words: Any, x: tuple[Pointer, int], j: Register, dots: np.ndarray) -> None:
        dots[:] = _meet("begin_products", (words, x, j), law)

    def finish_products(dots: np.ndarray) -> None:
        _meet("finish_products", None, lambda given: given)

    return begin_products, add_products, finish_products


def make_low_products(columns: int, shift: int) -> Callable[..., None]:
    """The sums of the high plane, shifted, and the low plane times columns of int8 over 256 positions."""

    def law(given: list[Any]) -> list[np.ndarray]:
        p, i = given[0][1]
        at = p._place(i, columns * 64)
        x = p.array[at : at + columns * 64].view(np.int8).reshape(columns // 8, 16, 8, 16)
        x = x.transpose(0, 2, 1, 3).reshape(columns, 256).astype(np.int64)
        # g, t, 32 positions, 16 of them, row g or g + 8, byte
        a = np.ascontiguousarray(_rows([low for low, _ in given], 32)).view(np.uint8)
        a = a.reshape(8, 4, 8, 2, 2, 4).transpose(4, 0, 2, 3, 1, 5).reshape(16, 256)
        return _fragments((_bytes(a, False) @ x.T).astype(np.int32))

    def low_products(low: np.ndarray, x: tuple[Pointer, int], dots: np.ndarray) -> None:
        dots[:] = (dots << shift) + _meet("low_products", (low.copy(), x), law)

    return low_products


def make_half_products(columns: int) -> Callable[..., None]:
    """Rows of float16 times columns of float16 over 16 positions."""

    def law(given: list[Any]) -> list[np.ndarray]:
        p, i = given[0][1]
        at = p._place(i, columns * 8)
        y = p.array[at : at + columns * 8].view(np.float16).reshape(columns // 8, 2, 8, 8)
        y = y.transpose(0, 2, 1, 3).reshape(columns, 16).astype(np.float64)
        # g, t, 8 positions, row g or g + 8, half
        a = np.ascontiguousarray(_rows([words for words, _ in given], 4)).view(np.float16)
        a = a.reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16).astype(np.float64)
        return _fragments((a @ y.T + 0.0).astype(np.float32))

    def half_products(a: Any, p: Pointer, i: Register, sums: np.ndarray) -> None:
        sums[:] = _meet("half_products", (a, (p, i)), law)

    return half_products
