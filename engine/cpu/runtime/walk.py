"""The algorithm by which the threads of a team run a pass: each thread claims tiles, and waits only for claimed tiles.

A pass is a list of operations.  An operation consists of tiles, which any threads may compute in any order and at the same
time.  Operations form stages: a stage begins when all tiles of the previous stage are done.  Every thread runs ``walk``::

    for each operation k:
        while an unclaimed tile of k is left:  claim it; compute it; count it as done
        if a stage ends with k:                wait until all tiles of the stage are done

An operation may be a *gate*: it is done when a word that another device sets is not 0.  The thread that has claimed its only
tile checks the word for a short time and then gives the tile back, so that no thread stays in compiled code for long.

No thread waits for a thread that the system has not scheduled, because such a thread has claimed no tile.  When it is
scheduled later, it finds no tiles and returns.  This may happen while the team runs a later pass, or after the memory of the
first pass has been freed.  Every word that a thread reads before it has claimed a tile therefore belongs to the team and
not to the pass.  Each of these words contains the number of a pass: if the number has changed, the thread's pass is over.
After a thread has claimed a tile, the pass cannot end before the tile is done.

Words shared by the threads (int64):

- ``words[PASS]``: the number of the pass (31 bits), the number of its threads (12 bits), and the number of its operations
  (20 bits); ``words[TABLE]``: the address of the pass's table (``engine/cpu/runtime/program.py``); ``words[FAILED]``: the
  number of the last pass in which a kernel failed; ``words[SLEEPERS]``: the number of threads that sleep in a pass;
  ``words[DRAINED]``: the number of the last pass that was ended early; ``words[WAITED]``: nanoseconds of waiting at gates;
  ``words[PARKED + 8 i]``: whether thread i is parked, that is, waits for its next pass outside of compiled code.
- ``left[k]``: the number of the pass (upper 32 bits), whether operation k is the last one of a stage (``ENDS``) and whether
  it is a gate (``GATE``), and the number of its tiles that are not claimed.
- ``undone[k]``, for the last operation of a stage: the number of the pass (upper 32 bits), and the number of tiles of the
  stage that are not done.
"""

from numba import njit

from engine.cpu.runtime.atomics import (
    add,
    call,
    fetch,
    load,
    load_at,
    nanoseconds,
    pause,
    sleep_while,
    store,
    swap_if,
    wake,
    yield_core,
)

PASS, TABLE, FAILED, SLEEPERS, DRAINED, WAITED, PARKED = 0, 8, 16, 24, 32, 40, 48  # a cache line each
THREAD_BITS, OPERATION_BITS = 12, 20
MOST_OPERATIONS = (1 << OPERATION_BITS) - 1
MOST_THREADS = (1 << THREAD_BITS) - 1

ENDS, GATE = 1 << 31, 1 << 30
TILES = GATE - 1
COUNT = (1 << 32) - 1

FUNCTION, RECORD, ITEMS, GRAIN, N_TILES, LAST = range(6)
"""The words of an operation in a pass's table: the address of its entry, the address of its arguments, the number of items,
the number of items per tile, the number of tiles, and the index of the last operation of its stage.  A gate has no entry, and
the address of its word in place of that of arguments."""
WORDS = 6

SPINS = 400
"""The number of times that a waiting thread checks for a change before it yields its core: about 10 us."""
YIELDS = 20
"""The number of times that it then yields its core before it sleeps, unless it waits at a gate."""
LINGERS = 4000
"""The number of times that a thread without a pass checks for one before it parks, and a thread at a gate before it sleeps.
The pass of the next token usually begins before, and the device usually answers."""


@njit(cache=True)
def begin(words, left, undone, number, table, given_left, given_undone, woken):
    """Begin the pass ``number``, whose table is at the address ``table``.  given_left, given_undone [n]: the initial values
    of ``left`` and ``undone``.  Sets woken[i] for each parked thread i, which the caller must wake."""
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
    """Take part in the pass ``number`` (a value of ``words[PASS]``), starting at operation k.  Returns after ``budget`` tiles
    or waits, with the operation to continue with, or when the pass is over, with the number of operations."""
    order, n = number >> 32, number & MOST_OPERATIONS
    while k < n:
        now = load(left, k)
        if now >> 32 != order:
            return n
        if now & TILES:
            if swap_if(left, k, now, now - 1):
                if now & GATE:
                    budget -= pass_gate(words, left, undone, number, k)
                else:
                    compute(words, left, undone, number, k, now & TILES)
                    budget -= 1
        elif now & ENDS:
            # A device takes longer than the last tile of a stage, and to wake from sleep takes longer than either.
            budget -= wait(words, undone, k, order, timeout, LINGERS if now & GATE else YIELDS)
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
    """Compute the tile of operation k that was claimed when ``unclaimed`` tiles were unclaimed."""
    at = load(words, TABLE) + 8 * WORDS * k
    grain, items = fetch(at, GRAIN), fetch(at, ITEMS)
    first = (fetch(at, N_TILES) - unclaimed) * grain
    if call(fetch(at, FUNCTION), fetch(at, RECORD), first, min(items, first + grain)):
        store(words, FAILED, number >> 32)
        take_all(words, left, undone, number)
    finish(words, undone, fetch(at, LAST), 1)


@njit
def pass_gate(words, left, undone, number, k):
    """Check the word of the claimed gate k until it is not 0 or the pass is drained, or for a short time, after which the
    gate is given back.  Returns the cost as a number of tiles."""
    at = load(words, TABLE) + 8 * WORDS * k
    word, begun, is_open = fetch(at, RECORD), nanoseconds(), False
    for _ in range(SPINS):
        is_open = load_at(word) != 0 or load(words, DRAINED) == number >> 32
        if is_open:
            break
        pause()
    add(words, WAITED, nanoseconds() - begun)
    if is_open:
        finish(words, undone, fetch(at, LAST), 1)
        return 1
    add(left, k, 1)
    return 8


@njit(inline="always")
def finish(words, undone, k, tiles):
    """Mark a number of tiles as done, in the stage whose last operation is k."""
    before = add(undone, k, -tiles)
    if before & COUNT == tiles and load(words, SLEEPERS) > 0:
        wake(undone, k)


@njit
def wait(words, undone, k, order, timeout, yields):
    """Wait for the end of the stage whose last operation is k, at most for ``timeout`` (``sleep_while``).  Returns the cost
    of the wait as a number of tiles.  yields: the number of times that the thread yields its core before it sleeps."""
    for _ in range(SPINS):
        still = load(undone, k)
        if still >> 32 != order or still & COUNT == 0:
            return 0
        pause()
    for _ in range(yields):
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
    """Claim all remaining tiles and mark them as done without computing them, so that the pass ends soon."""
    order = number >> 32
    store(words, DRAINED, order)
    # In reverse order, so that a stage is not complete, and the next one not entered, before its own tiles are claimed.
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
    """End a pass early: claim all remaining tiles, and wait for tiles that are being computed."""
    take_all(words, left, undone, number)
    for k in range(number & MOST_OPERATIONS):
        while load(undone, k) >> 32 == number >> 32 and load(undone, k) & COUNT != 0:
            wait(words, undone, k, number >> 32, timeout, YIELDS)
            # A gate may have been given back since.
            take_all(words, left, undone, number)


@njit(cache=True, nogil=True)
def serve(words, left, undone, me, number, timeout):
    """Take part in passes as thread ``me``, and park if none begins for some time.  number: the last pass that the thread has
    seen.  Returns the updated number."""
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
            # If a pass began before the mark was set, continue, unless that pass has removed the mark: then it wakes this
            # thread.
            if load(words, PASS) == number or not swap_if(words, PARKED + 8 * me, 1, 0):
                return number
            idle = 0
