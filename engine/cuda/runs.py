"""Runs: consecutive rows of a pass that belong to one sequence and have consecutive positions (``engine/cpu/runs.py``)."""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import lanes_max, lanes_sum
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction
from engine.limits import MOST_TOGETHER

I = np.int32  # noqa: E741
U = np.uint32


@device
def rows_of_run(positions, sequences, rows, begin, lane):
    """The number of rows of the run that begins at row ``begin``; 0 if this row continues a run, or is a copy of the row
    before.  All lanes of a warp call it.  The last lane has the row before, the others have this one and those after it."""
    place, sequence = positions[begin], sequences[begin]
    other = I(max(I(begin - 1), I(0))) if lane == 31 else min(I(begin + lane), I(rows - 1))
    ahead, alike = I(positions[other] - place), sequences[other] == sequence
    follows = lane == 31 and begin > 0 and alike and (ahead == 0 or ahead == -1)
    member = lane < 31 and begin + lane < rows and alike and ahead == lane
    first_other = I(-lanes_max(I(-32) if member else I(-lane)))
    return I(0) if lanes_max(I(1) if follows else I(0)) > 0 else first_other


@device
def nth_run(positions, sequences, rows, number, lane):
    """(the first row, the number of rows) of run ``number``; (-1, 0) if there are fewer.  All lanes of a warp call it."""
    begin, first = I(-1), I(0)
    while first < rows and begin < 0:
        row = I(first + lane)
        begins = False
        if row < rows:
            before = I(max(I(row - 1), I(0)))
            ahead = I(positions[row] - positions[before])
            begins = row == 0 or sequences[row] != sequences[before] or (ahead != 0 and ahead != 1)
        bits = lanes_sum(I(I(1) << lane) if begins else I(0))
        count = I(cuda.popc(bits))
        if number < count:
            rank = I(cuda.popc(I(bits & I(I(I(1) << lane) - 1))))
            begin = I(lanes_max(row if begins and rank == number else I(-1)))
        number, first = I(number - count), I(first + 32)
    if begin < 0:
        return begin, I(0)
    row = min(I(begin + lane), I(rows - 1))
    member = begin + lane < rows and sequences[row] == sequences[begin] and positions[row] - positions[begin] == lane
    return begin, I(-lanes_max(I(-32) if member else I(-lane)))


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


def parts_of_runs(rows: int, size: int, spare: int = 1) -> int:
    """The number of parts of ``make_find_part`` for a pass of several runs with so many ``rows``, in the same units as
    ``size``."""
    return rows // size + spare * MOST_TOGETHER


def make_first_part(size: int, group: int = 1, spare: int = 1) -> DeviceFunction:
    """The device function ``first_part(runs, run)``: the number of the first part of a run.

    A run has parts of ``size`` elements, of which a row has ``group``, and up to ``spare`` further ones, which may be empty:
    those of the run that begins at row t are number t * group // size + spare * (number of the run) and those after it, so
    nothing has to be counted.  runs: ``Batch.runs``, whose unused entries are empty runs.
    """

    @device
    def first_part(runs, run):
        return I(I(U(runs[run] * group) // U(size)) + spare * run)

    return first_part


def make_find_part(size: int, group: int = 1, spare: int = 1) -> DeviceFunction:
    """The device function ``find_part(runs, index)``: (the first row of the run that a part of a pass belongs to, the row
    after its last, its slot, the number of the part in the run, the number of the run).  See ``make_first_part``."""
    n, first_part = MOST_TOGETHER, make_first_part(size, group, spare)
    steps = n.bit_length() - 1
    assert n == 1 << steps

    @device
    def find_part(runs, index):
        run = I(0)
        for k in range(steps):
            further = I(run + (n >> (k + 1)))
            if first_part(runs, further) <= index:
                run = further
        number = I(index - first_part(runs, run))
        return I(runs[run]), I(runs[run + 1]), I(runs[run + n + 1]), number, run

    return find_part
