"""Copies of arrays of a backend to host memory that nobody waits for."""

from typing import Any

import numpy as np


def check(ops: Any) -> None:
    """Copies have what was in the arrays when they were begun, whatever is stored there later, also by the next copies."""
    rng = np.random.default_rng(7)
    shapes = [(3, 5), (1, 1 << 18), (700, 9), (2, 4, 8)]
    begun = []
    for factor in (1, 3, 2):  # the second time more than pinned memory has room for
        values = [rng.random((factor * n, *rest), np.float32) for n, *rest in shapes]
        arrays = [ops.upload(each.copy()) for each in values]
        found = [np.full_like(each, np.nan) for each in values]
        begun.append((ops.begin_download(list(zip(arrays, found, strict=True))), values, found))
        for array, each in zip(arrays, values, strict=True):
            ops.store(array, 0, np.zeros_like(each))
    for copies, values, found in begun:
        for each in copies:
            each.wait()
            each.wait()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(values, found, strict=True))
    assert all(each.wait() is None for each in ops.begin_download([]))
