"""The memory of a process that serves: what is searched for garbage, and what goes back to the system."""

import ctypes
import gc
import os

M_ARENA_MAX = -8
"""The parameter of glibc's ``mallopt`` for the number of arenas."""

YOUNG = 50_000
"""Objects that are made before the newest ones are searched for garbage: more than 128 requests that arrive together have.
With Python's default, 700 to 2000, these searches would take a quarter of the time in which such requests are read."""


def one_arena() -> None:
    """Let all threads allocate from the same memory, unless the environment has MALLOC_ARENA_MAX.

    By default, glibc gives up to eight arenas to each core, and keeps in each what the largest requests of its threads took.
    Takes effect if it is called before threads exist.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        try:
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        except (AttributeError, OSError, TypeError):  # another C library than glibc
            pass


def search_rarely() -> None:
    """Search for garbage seldom: most of what a request makes is freed without a search, when nothing refers to it."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def freeze() -> None:
    """Exclude all objects that exist from the search for garbage: models live long, and each search through their hundreds
    of thousands of objects would stop all threads for 0.1 s and more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Give unused memory back to the system, where the C library keeps it: after a text of megabytes that is a hundred
    times as much.  Takes some milliseconds, during which other threads run."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library than glibc
        pass
