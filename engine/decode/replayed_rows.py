"""The logits of a text that is known, read on the GPU that has computed them: their digests, and the tokens that a sampler
chooses.  So a replay copies a few words of each row to the host, and not a row of the vocabulary."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from engine.cuda.digest import WORDS
from engine.cuda.runtime.tensor import Tensor
from engine.decode.device_params import edits, token_of
from engine.decode.device_sampler import DeviceSampler, Rows, packed_digests
from engine.decode.graph_operations import GraphOperations
from engine.decode.request import ReadRow
from engine.limits import DECODE_ANSWERS
from engine.sampling.finite import check_largest
from engine.sampling.row_digest import unpacked
from engine.sampling.sampler import Sampler

MOST_ROWS = DECODE_ANSWERS
"""The most rows of a launch of the kernels that choose tokens."""


class ReplayedRows:
    """Reads rows of logits of one text on the device (``engine.decode.request.RowReader``).  The caller holds the lock of
    the model."""

    def __init__(self, ops: GraphOperations, sampler: Sampler, text: Sequence[int]) -> None:
        """sampler: one whose parameters the kernels implement, without a grammar; text: all of its tokens.  Raises
        DeviceError if memory runs out."""
        self._device = device = ops.device
        self._sampler = sampler
        # Each row has a slot of its own for its digest, and all rows have the parameters and the history of slot 0.
        self._chooser = DeviceSampler(device, sampler.n_vocab, len(text), ring_steps=1, n_slots=MOST_ROWS)
        self._chooser.begin(sampler)
        device.write(self._chooser.step.address, np.zeros(MOST_ROWS, np.int32))
        _ = self._chooser.digest_memory
        each = np.arange(MOST_ROWS + 1, dtype=np.int32)
        self._history, self._positions = ops.upload(np.array(text, np.int32)), ops.zeros((MOST_ROWS,), np.int32)
        self._same, self._each = ops.zeros((MOST_ROWS,), np.int32), ops.upload(each)

    def __call__(self, rows: Tensor, first: int) -> np.ndarray:
        """See :class:`engine.decode.request.RowReader`."""
        n = rows.shape[0]
        blocks = [slice(at, min(at + MOST_ROWS, n)) for at in range(0, n, MOST_ROWS)]
        return np.concatenate([self._block(rows[block], first + block.start) for block in blocks])

    def _block(self, rows: Tensor, first: int) -> np.ndarray:
        (n, stride), chooser, p = rows.shape, self._chooser, self._sampler.params
        self._device.write(self._positions.address, np.arange(first, first + n, dtype=np.int32))
        places = self._each.address, self._history.address
        # No kernel reads tokens.
        of_digests = Rows(0, self._positions.address, self._each.address, *places)
        of_choices = of_digests._replace(sequences=self._same.address)
        chooser.launch_digests(rows.address, stride, n, of_digests)
        chooser.launch_choices(rows.address, stride, n, of_choices, p.greedy, edits(p))
        found = self._device.read(chooser.found.address, (n,), np.int32)
        # A slot has room for several steps, of several rows each.
        return np.column_stack([chooser.digest_memory[0][:n, 0, 0], found])

    def check(self, read: np.ndarray, first: int) -> None:
        """See :class:`engine.decode.request.RowReader`."""
        check_largest(read[:, WORDS - 3].copy().view(np.float32), first)

    def rows(self, read: np.ndarray) -> list[ReadRow]:
        """See :class:`engine.decode.request.RowReader`."""
        digests, words = map(unpacked, packed_digests(read[:, :WORDS])), read[:, WORDS].tolist()
        return [
            ReadRow(each, partial(token_of, word, self._sampler)) for each, word in zip(digests, words, strict=True)
        ]
