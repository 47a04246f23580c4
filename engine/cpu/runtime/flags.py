"""Words that the host and a device set for each other while a pass of the device runs."""

from numba import njit, types

from engine.compile.jobs import CPUJob
from engine.cpu.runtime.atomics import load, pause, store, swap_if


@njit(cache=True, nogil=True)
def wait(flags, i, budget):
    """Wait until flags[i], int64, is not 0; returns whether it is.  budget: the number of times that it is read, about 40
    cycles apart."""
    for _ in range(budget):
        if load(flags, i) != 0:
            return True
        pause()
    return False


@njit(cache=True)
def put(flags, i, value):
    """Set flags[i], int64.  Everything that this thread has written is visible to whoever reads the value."""
    store(flags, i, value)


@njit(cache=True)
def put_if_clear(flags, i, value):
    """Set flags[i], int64, if it is 0, as ``put`` does; returns whether it was."""
    return swap_if(flags, i, 0, value)


def flag_jobs() -> list[CPUJob]:
    """The compile jobs of these functions."""
    flags, word = types.Array(types.int64, 1, "C"), types.int64
    return [CPUJob(__name__, name, (flags, word, word)) for name in ("wait", "put", "put_if_clear")]
