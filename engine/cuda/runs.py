"""Runs: consecutive rows of a pass that belong to one sequence and have consecutive positions (``engine/cpu/runs.py``)."""

import numpy as np

from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

I = np.int32  # noqa: E741


def make_find_run(mixed: bool, most: int) -> DeviceFunction:
    """The device function ``find_run(positions, sequences, t, position, sequence)``: the row of which row t is a copy, itself
    if it is none, and the number of rows of its run before that, counted up to ``most``, or further if it costs nothing.

    position, sequence: those of row t.  Unless ``mixed``, all rows are a run.
    """

    @device
    def find_run(positions, sequences, t, position, sequence):
        own, since = t, t
        if mixed:
            while own > 0 and sequences[own - 1] == sequence and positions[own - 1] == position:
                own = I(own - 1)
            since = I(0)
            while since < most and since < own:
                before = I(own - since - 1)
                if sequences[before] != sequence or positions[before] != position - since - 1:
                    break
                since = I(since + 1)
        return own, since

    return find_run


def make_overwritten(mixed: bool) -> DeviceFunction:
    """The device function ``overwritten(positions, sequences, rows, t, position, sequence, length)``: whether a later row of
    the run of row t has the same place in a ring of this length.

    rows: those of the pass; position, sequence: those of row t.  Unless ``mixed``, all rows are a run.
    """

    @device
    def overwritten(positions, sequences, rows, t, position, sequence, length):
        later = I(t + length)
        if later >= rows:
            return False
        return not mixed or (sequences[later] == sequence and positions[later] == position + length)

    return overwritten
