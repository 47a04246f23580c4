"""The logit lens (nostalgebraist 2020): the logits that the output head gives for the residual stream after any layer."""

import numpy as np

from engine.arrays import Array, Batch
from engine.models.base import Model
from engine.models.needs import stream_width


class LensPass:
    """A pass that applies the output norm and the output matrix to rows of the residual stream that are copied to the device.
    It stores nothing in the cache."""

    def __init__(self, model: Model, most: int) -> None:
        """model: a model on one device; most: the number of rows that are usually wanted."""
        self._model = model
        #: The number of rows of a pass, so that a single one is recorded.
        self._rows = min(most, model.ops.decode_rows)
        self._stream = model.ops.zeros((self._rows, stream_width(model.config)), np.float32)

    def __call__(self, batch: Batch[Array], n_logits: int) -> Array:
        """The operations of the pass (``engine.ops.executor.Forward``).  Returns float32 [n_logits, n_vocab]."""
        return self._model.logits_of(self._stream[slice(n_logits)])

    def logits(self, streams: np.ndarray) -> np.ndarray:
        """The logits for rows of the residual stream, float32 [n, width]: float32 [n, n_vocab]."""
        ops, found, n = self._model.ops, [], self._rows
        nothing = np.zeros(n, np.int32)
        batch = Batch(nothing, nothing, nothing)
        for first in range(0, len(streams), n):
            rows = streams[first : first + n]
            ops.store(self._stream, 0, rows)
            logits = ops.run(self, batch, n)
            assert logits is not None
            found.append(logits[: len(rows)])
        return np.concatenate(found)
