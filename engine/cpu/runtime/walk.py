"""How the threads of a team go through a pass: each one claims tiles, and waits only for tiles that others have claimed.

A pass is a list of operations, and an operation a number of tiles that any thread may compute, in any order, at the same
time.  Operations form stages: a stage begins when all tiles of the one before are done.  Every thread runs ``walk``::

    for each operation k:
        while an unclaimed tile of k is left:  claim it; compute it; count it as done
        if a stage ends with k:                wait until all tiles of the stage are done

A thread that the system does not run has claimed nothing, so nobody waits for it.  When it arrives it finds no tiles and
passes through.  It may even arrive when the threads are in a later pass, or when the memory of its own pass has been freed.
So every word that it reads before it has claimed a tile belongs to the team, never to the pass, and contains the number of
the pass: if it is another one, its own pass is over.  Once a thread has claimed a tile, the pass cannot end without it.

Words shared by the threads (int64):

- ``words[PASS]``: the number of the pass (31 bits), the number of threads that take part (12 bits), the number of operations
  (20 bits); ``words[TABLE]``: the address of the pass's table (``engine/cpu/runtime/program.py``); ``words[FAILED]``: the
  number of the last pass in which a kernel failed; ``words[SLEEPERS]``: the number of threads that sleep in a pass;
  ``words[PARKED + 8 i]``: whether thread i waits for its next pass outside of compiled code.
- ``left[k]``: the number of the pass (upper 32 bits), whether a stage ends with operation k (``ENDS``), and the number of its
  tiles that are not claimed.
- ``undone[k]``, for the last operation of a stage: the number of the pass (upper 32 bits), and the number of tiles of the
  stage that are not done.
"""

from numba import njit

from engine.cpu.runtime.atomics import add, call, fetch, load, pause, sleep_while, store, swap_if, wake, yield_core

PASS, TABLE, FAILED, SLEEPERS, PARKED = 0, 8, 16, 24, 32  # a cache line each
THREAD_BITS, OPERATION_BITS = 12, 20
MOST_OPERATIONS = (1 << OPERATION_BITS) - 1
MOST_THREADS = (1 << THREAD_BITS) - 1

ENDS = 1 << 31
TILES = ENDS - 1
COUNT = (1 << 32) - 1

FUNCTION, RECORD, ITEMS, GRAIN, N_TILES, LAST = range(6)
"""The words of an operation in a pass's table: its entry, the address of its arguments, its number of items, the items of a
tile, its number of tiles, and the last operation of its stage."""
WORDS = 6

SPINS = 400
"""How often a waiting thread looks for a change before it lets others use its core: some 10 us."""
YIELDS = 20
"""How often it then lets others use its core before it sleeps."""
LINGERS = 4000
"""How often a thread without a pass looks for one before it parks: the next token's pass follows soon."""


@njit(cache=True)
def begin(words, left, undone, number, table, given_left, given_undone, woken):
    """Begin the pass ``number``, whose table is at the address ``table``; given_left, given_undone [n]: the tiles of its
    operations and stages.  Writes to woken [number of threads] which of the threads are parked: the caller must wake them."""
    order = (number >> 32) << 32
    for k in range(number & MOST_OPERATIONS):
        store(left, k, order + given_left[k])
        store(undone, k, order + given_undone[k])
    store(words, TABLE, table)
    store(words, PASS, number)
    for i in range(1, woken.size):
        woken[i] = 1 if swap_if(words, PARKED + 8 * i, 1, 0) else 0


@njit(cache=True, nogil=True)
def walk(words, left, undone, number, k, budget, timeout):
    """Take part in the pass ``number`` (a value of ``words[PASS]``), from operation k on.  Returns the operation to continue
    with: the caller regains control after ``budget`` tiles or waits; the number of operations if the pass is over."""
    order, n = number >> 32, number & MOST_OPERATIONS
    while k < n:
        now = load(left, k)
        if now >> 32 != order:
            return n
        if now & TILES:
            if swap_if(left, k, now, now - 1):
                compute(words, left, undone, number, k, now & TILES)
                budget -= 1
        elif now & ENDS:
            budget -= wait(words, undone, k, order, timeout)
            still = load(undone, k)
            if still >> 32 != order:
                return n
            if still & COUNT == 0:
                k += 1
        else:
            k += 1
        if budget <= 0:
            return k
    return n


@njit
def compute(words, left, undone, number, k, unclaimed):
    """Compute the tile of operation k that was claimed when ``unclaimed`` tiles were left."""
    at = load(words, TABLE) + 8 * WORDS * k
    grain, items = fetch(at, GRAIN), fetch(at, ITEMS)
    first = (fetch(at, N_TILES) - unclaimed) * grain
    if call(fetch(at, FUNCTION), fetch(at, RECORD), first, min(items, first + grain)):
        store(words, FAILED, number >> 32)
        take_all(words, left, undone, number)
    finish(words, undone, fetch(at, LAST), 1)


@njit(inline="always")
def finish(words, undone, k, tiles):
    """Count tiles of the stage that ends with operation k as done."""
    before = add(undone, k, -tiles)
    if before & COUNT == tiles and load(words, SLEEPERS) > 0:
        wake(undone, k)


@njit
def wait(words, undone, k, order, timeout):
    """Wait for the end of the stage that ends with operation k, but not longer than ``timeout`` (``sleep_while``).  Returns
    the price of the wait, as a number of tiles."""
    for _ in range(SPINS):
        still = load(undone, k)
        if still >> 32 != order or still & COUNT == 0:
            return 0
        pause()
    for _ in range(YIELDS):
        yield_core()
        still = load(undone, k)
        if still >> 32 != order or still & COUNT == 0:
            return 1
    add(words, SLEEPERS, 1)
    still = load(undone, k)
    if still >> 32 == order and still & COUNT != 0:
        sleep_while(undone, k, still, timeout)
    add(words, SLEEPERS, -1)
    return 64


@njit
def take_all(words, left, undone, number):
    """Claim all tiles that are left and count them as done without computing them, so that the pass ends soon."""
    order = number >> 32
    # From the end: a stage is not complete, and the next one not entered, before its own tiles are taken.
    for k in range((number & MOST_OPERATIONS) - 1, -1, -1):
        while True:
            now = load(left, k)
            if now >> 32 != order or now & TILES == 0:
                break
            if swap_if(left, k, now, now - (now & TILES)):
                at = load(words, TABLE) + 8 * WORDS * k
                finish(words, undone, fetch(at, LAST), now & TILES)


@njit(cache=True, nogil=True)
def drain(words, left, undone, number, timeout):
    """End a pass early: take all tiles that are left, and wait for those that are being computed."""
    take_all(words, left, undone, number)
    for k in range(number & MOST_OPERATIONS):
        while load(undone, k) >> 32 == number >> 32 and load(undone, k) & COUNT != 0:
            wait(words, undone, k, number >> 32, timeout)


@njit(cache=True, nogil=True)
def serve(words, left, undone, me, number, timeout):
    """Take part in passes as thread ``me`` until none has come for a while, and park; number: the last pass seen.  Returns
    the last pass seen."""
    idle = 0
    while True:
        now = load(words, PASS)
        if now != number:
            number, idle = now, 0
            if me < (now >> OPERATION_BITS) & MOST_THREADS:
                walk(words, left, undone, number, 0, 1 << 62, timeout)
            continue
        idle += 1
        if idle < SPINS:
            pause()
        elif idle < LINGERS:
            yield_core()
        else:
            store(words, PARKED + 8 * me, 1)
            # A pass that began in between did not see the mark, unless it has removed it and unlocks this thread.
            if load(words, PASS) == number or not swap_if(words, PARKED + 8 * me, 1, 0):
                return number
            idle = 0
