"""Arrays that go from one backend of the CPU to another one: plain copies."""

from collections.abc import Sequence

import numpy as np


class HostCrossing:
    """The way of arrays from a backend of the CPU to another one (``engine.ops.crossing.Crossing``)."""

    def __init__(self) -> None:
        self._sent: dict[int, list[np.ndarray]] = {}
        self._number = 0

    def send(self, arrays: Sequence[np.ndarray]) -> int:
        self._number += 1
        self._sent[self._number] = [array.copy() for array in arrays]
        return self._number

    def receive(self, ticket: int, arrays: Sequence[np.ndarray]) -> None:
        for array, sent in zip(arrays, self._sent.pop(ticket), strict=True):
            array[...] = sent.reshape(array.shape)

    def forget(self, ticket: int) -> None:
        self._sent.pop(ticket, None)
