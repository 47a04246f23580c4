"""Passes over rows of a single sequence."""

from typing import Any

import numpy as np

from engine.arrays import Batch


def one_sequence(positions: np.ndarray, gpu: Any = None) -> Batch[Any]:
    """Rows at ``positions`` int32 [rows] of the sequence in slot 0, for operations to which tokens do not matter; gpu: the
    backend to whose memory they are uploaded, if any."""
    slots = np.zeros(positions.size, np.int32)
    if gpu is None:
        return Batch(positions, positions, slots)
    at = gpu.upload(positions)
    return Batch(at, at, gpu.upload(slots))
