"""The rows of steps in a device's memory: token, position and slot of each, and what they are laid out from."""

from collections.abc import Sequence

import numpy as np

from engine.cuda import accept
from engine.cuda.runtime.plans import decode_size
from engine.decode.device_sampler import Rows
from engine.decode.graph_operations import GraphOperations
from engine.decode.running import InFlightRequest
from engine.limits import DECODE_ANSWERS, DECODE_ROWS

LAYOUTS = 16
"""The number of row layouts in pinned memory: more than the number of passes in flight."""


class StepRows:
    """The rows of the steps of one model.  A step writes those of the next one.  They are laid out anew if another pass has
    overwritten them, or if other requests or drafts of the host take part."""

    def __init__(self, ops: GraphOperations, n_slots: int, n_ctx: int) -> None:
        self._ops = ops
        self._device = ops.device
        self._n_ctx = n_ctx
        #: The tokens of each request by position, int32 [slots, n_ctx].
        self.history = ops.zeros((n_slots, n_ctx), np.int32)
        #: The position of the last sampled token of each request, int32 [slots].
        self.at = ops.zeros((n_slots,), np.int32)
        #: The first row of each entry: in the latest layout, and, as row n of a table, for a single entry of n rows.
        self._starts = ops.zeros((DECODE_ANSWERS + 1,), np.int32)
        self._alone = ops.upload(np.array([[0] + DECODE_ROWS * [n] for n in range(DECODE_ROWS + 1)], np.int32))
        self._layouts, self._layouts_address = ops.device.pinned((LAYOUTS, accept.LAYOUT), np.int32)
        self._n_layouts = 0
        #: The entries whose rows are in place for the next step: (slot, number of rows), 0 for any number.
        self._placed: list[tuple[int, int]] = []

    def begin(self, slot: int, known: Sequence[int]) -> None:
        """Add a request whose last sampled token is the last of ``known``."""
        self._device.write(self.history[slot : slot + 1].address, np.asarray(known, np.int32))
        self._device.write(self.at[slot : slot + 1].address, np.array([len(known) - 1], np.int32))
        self.displace()

    def displace(self) -> None:
        """Lay out the rows of the next step anew."""
        self._placed = []

    def place(self, requests: Sequence[InFlightRequest], slots: Sequence[int], rows_of: Sequence[int]) -> None:
        """Lay out the rows of a step, unless they are in place.  slots, rows_of: the slot of each request, and its number of
        rows."""
        entries = list(zip(slots, rows_of, strict=True))
        used = sum(rows_of)
        on_host = any(proposal.tokens for _, proposal in requests)
        # For a single entry, rows are in place for any number of drafts.
        wanted = entries if len(requests) > 1 else [(entries[0][0], 0)]
        if wanted == self._placed and not on_host and (len(requests) == 1 or used == decode_size(used)):
            return
        layout = self._layouts[self._n_layouts % LAYOUTS]
        address = self._layouts_address + 4 * accept.LAYOUT * (self._n_layouts % LAYOUTS)
        self._n_layouts += 1
        accept.write_layout(
            layout, [(slot, rows, r.proposal.tokens) for (slot, rows), r in zip(entries, requests, strict=True)]
        )
        ops = self._ops
        arrays = self.at, self.history, ops.tokens, ops.positions, ops.sequences, self._starts
        self._device.launch(
            accept.lay_out(), 1, accept.LAY_OUT_THREADS, [address, self._n_ctx, *(array.address for array in arrays)]
        )
        self._placed = wanted

    def addresses(self, rows: int, mixed: bool) -> Rows:
        """Where a step of so many rows finds them; mixed: whether they belong to several requests."""
        ops, starts = self._ops, self._starts if mixed else self._alone[rows : rows + 1]
        arrays = ops.tokens, ops.positions, ops.sequences, starts, self.history
        return Rows(*(array.address for array in arrays))
